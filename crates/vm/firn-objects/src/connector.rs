//! Connections to S3 on which an upload creates an object, and never replaces one.
//!
//! The parts of an upload become an object by `POST /bucket/key?uploadId=...`. With
//! `If-None-Match: *` the store does that only if there is no such object, in one step. The crate
//! `object_store` sends this header for small objects, but not for uploads in parts; so Firn adds
//! the header below the library. A signature does not cover it, which S3 allows.

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use reqwest::Method;
use reqwest::header::{HeaderValue, IF_NONE_MATCH};

/// Makes connections whose uploads never replace an object.
#[derive(Debug)]
pub(crate) struct CreateOnlyConnector;

#[derive(Debug)]
struct CreateOnlyService {
    client: HttpClient,
}

impl HttpConnector for CreateOnlyConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(CreateOnlyService { client }))
    }
}

#[async_trait]
impl HttpService for CreateOnlyService {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if completes_upload(&request) {
            request.headers_mut().insert(IF_NONE_MATCH, HeaderValue::from_static("*"));
        }
        self.client.execute(request).await
    }
}

/// Whether a request makes an object of the parts of an upload.
fn completes_upload(request: &HttpRequest) -> bool {
    let query = request.uri().query().unwrap_or_default();
    request.method() == Method::POST && query.split('&').any(|it| it.starts_with("uploadId="))
}
