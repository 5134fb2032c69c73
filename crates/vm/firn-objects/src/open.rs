//! Opens a store by the conventions of that store: the variables AWS_... of the environment.

use std::sync::Arc;
use std::time::Duration;

use firn_cache::StoreEnvironment;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::http::{HttpBuilder, HttpStore};
use object_store::{Certificate, ClientOptions};

use crate::connector::CreateOnlyConnector;
use crate::storage::{PutRule, RequestLimits, retry_config};

/// One of these shows where credentials come from.
const CREDENTIALS: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
];

/// Opens a bucket. The error does not repeat what the environment has.
pub(crate) fn open_s3(
    bucket: &str,
    rule: PutRule,
    environment: &StoreEnvironment,
    limits: RequestLimits,
) -> Result<AmazonS3, String> {
    install_crypto();
    let endpoint = find_endpoint(environment);
    let has_credentials = CREDENTIALS.iter().any(|it| environment.contains_key(*it));
    if endpoint.is_some() && !has_credentials {
        return Err("AWS_ENDPOINT_URL is set, but AWS_ACCESS_KEY_ID is not".to_owned());
    }
    let is_plain = endpoint.is_some_and(|it| it.starts_with("http://"));
    let mut builder = configure(environment)
        .with_bucket_name(bucket)
        .with_unsigned_payload(false)
        // Each store has the request that deletes one object, not each the one that deletes several.
        .with_config(AmazonS3ConfigKey::DisableBulkDelete, "true")
        .with_retry(retry_config(limits))
        .with_client_options(client_options(environment, limits)?.with_allow_http(is_plain));
    if rule == PutRule::Create {
        builder = builder.with_http_connector(CreateOnlyConnector);
    }
    builder.build().map_err(|error| error.to_string())
}

/// What the variables of the store configure. One that the library does not know is ignored, as
/// among the variables of a process.
fn configure(environment: &StoreEnvironment) -> AmazonS3Builder {
    let known = environment.iter().filter_map(|(name, value)| {
        let key: AmazonS3ConfigKey = name.to_ascii_lowercase().parse().ok()?;
        Some((key, value))
    });
    known.fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value))
}

/// Opens a web server.
pub(crate) fn open_web(
    host: &str,
    has_tls: bool,
    environment: &StoreEnvironment,
    limits: RequestLimits,
) -> Result<HttpStore, String> {
    install_crypto();
    let scheme = if has_tls { "https" } else { "http" };
    HttpBuilder::new()
        .with_url(format!("{scheme}://{host}"))
        .with_retry(retry_config(limits))
        .with_client_options(client_options(environment, limits)?.with_allow_http(!has_tls))
        .build()
        .map_err(|error| error.to_string())
}

/// The store that is used instead of that of AWS.
pub(crate) fn find_endpoint(environment: &StoreEnvironment) -> Option<String> {
    let value = |name| environment.get(name).cloned().filter(|it| !it.is_empty());
    value("AWS_ENDPOINT_URL_S3")
        .or_else(|| value("AWS_ENDPOINT_URL"))
        .or_else(|| value("AWS_ENDPOINT"))
}

fn client_options(
    environment: &StoreEnvironment,
    limits: RequestLimits,
) -> Result<ClientOptions, String> {
    let options = ClientOptions::new()
        .with_connect_timeout(Duration::from_secs(5))
        .with_timeout(limits.attempt_max);
    let Some(bundle) = environment.get("AWS_CA_BUNDLE").filter(|it| !it.is_empty()) else {
        return Ok(options);
    };
    let failed = |problem: String| format!("AWS_CA_BUNDLE names a file that {problem}");
    let pem = std::fs::read(bundle).map_err(|error| failed(format!("can't be read: {error}")))?;
    let certificates = Certificate::from_pem_bundle(&pem)
        .map_err(|_| failed("has no certificates in PEM".to_owned()))?;
    Ok(certificates.into_iter().fold(options, ClientOptions::with_root_certificate))
}

/// Selects the code for TLS that the rest of Firn uses. A second call changes nothing.
fn install_crypto() {
    let provider = rustls::crypto::ring::default_provider();
    let _: Result<(), Arc<_>> = provider.install_default();
}
