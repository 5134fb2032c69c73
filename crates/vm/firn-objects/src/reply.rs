//! What a store answered, as an error of Firn.
//!
//! Stores answer a refused request with XML that has a code, a message, and often more: the access
//! key, the token, the text that was signed. Only the code and the message are taken from it.
//!
//! ```text
//!   <Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message>
//!          <Token-0>...</Token-0></Error>             --> "ExpiredToken: The provided token has expired."
//! ```

use std::error::Error;

use crate::error::StoreError;
use firn_cache::StoreLocation;

/// Codes of answers that mean: these credentials may not do that. Some stores send them with the
/// status 400.
const DENIED: [&str; 13] = [
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidSecurity",
    "InvalidToken",
    "NotSignedUp",
    "RequestExpired",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
];

/// The maximum length of a reason, in characters.
const REASON_CHARS_MAX: usize = 300;

/// The error for a request that failed.
pub(crate) fn request_error(
    location: &StoreLocation,
    step: &'static str,
    error: &object_store::Error,
) -> StoreError {
    use object_store::Error as Reply;
    let text = error.to_string();
    let code = find_element(&text, "Code");
    let location = location.clone();
    let reason = describe_reason(&text, error);
    let status = find_status(&text).unwrap_or_default();
    let is_denied = code.is_some_and(|code| DENIED.contains(&code)) || status.starts_with("403");
    match error {
        _ if code == Some("NoSuchBucket") => {
            StoreError::Missing { what: "bucket", location: location.with_key("") }
        }
        Reply::PermissionDenied { .. } | Reply::Unauthenticated { .. } => {
            StoreError::Denied { location, reason }
        }
        _ if status.starts_with("416") => StoreError::NoSuchRange(location),
        _ if is_denied => StoreError::Denied { location, reason },
        Reply::NotFound { .. } if code != Some("NoSuchUpload") => {
            StoreError::Missing { what: "object", location }
        }
        Reply::AlreadyExists { .. } => StoreError::Taken(location),
        Reply::Precondition { .. } => StoreError::Taken(location),
        _ => {
            let was_repeated = text.contains(" retries, max_retries");
            StoreError::Failed { location, step, reason, was_repeated }
        }
    }
}

/// The store's own reason, or the innermost cause.
fn describe_reason(text: &str, error: &object_store::Error) -> String {
    let reason = match (find_element(text, "Code"), find_element(text, "Message")) {
        (Some(code), Some(message)) if !message.is_empty() => format!("{code}: {message}"),
        (Some(code), _) => code.to_owned(),
        _ => match find_status(text) {
            Some(status) => status.to_owned(),
            None => innermost_cause(error),
        },
    };
    reason.chars().take(REASON_CHARS_MAX).collect()
}

/// The text of an element of XML.
fn find_element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once("</").map(|(content, _)| content)
}

/// The HTTP status that an error of the library has in its text.
fn find_status(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("status code: ")?;
    Some(rest.split_once(':').map_or(rest, |(status, _)| status).trim())
}

fn innermost_cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.to_owned().into() }
    }

    fn describe(text: &str) -> StoreError {
        let location: StoreLocation = "s3://vms/web.firn".parse().unwrap();
        request_error(&location, "read it", &generic(text))
    }

    #[test]
    fn an_answer_is_reduced_to_its_code_and_message() {
        let text = "Server returned non-2xx status code: 400 Bad Request: <Error><Code>ExpiredToken\
            </Code><Message>The provided token has expired.</Message><Token-0>hush-token</Token-0>\
            <AWSAccessKeyId>hush-id</AWSAccessKeyId><StringToSign>hush-text</StringToSign></Error>";
        let error = describe(text);
        assert!(matches!(error, StoreError::Denied { .. }), "{error}");
        let shown = format!("{error} {error:?}");
        assert!(shown.contains("ExpiredToken: The provided token has expired."), "{shown}");
        assert!(!shown.contains("hush"), "{shown}");
    }

    #[test]
    fn a_status_without_a_code_is_a_reason() {
        let error =
            describe("Server returned non-2xx status code: 503 Service Unavailable: <html>");
        assert_eq!(error.to_string(), "s3://vms/web.firn: cannot read it: 503 Service Unavailable");
    }

    #[test]
    fn a_missing_bucket_is_no_missing_object() {
        let error = describe("status code: 404 Not Found: <Code>NoSuchBucket</Code>");
        assert_eq!(error.to_string(), "there is no bucket s3://vms/");
    }

    #[test]
    fn a_full_store_is_reported_with_its_own_words() {
        let error = describe("<Code>QuotaExceeded</Code><Message>Bucket quota exceeded</Message>");
        let text = "s3://vms/web.firn: cannot read it: QuotaExceeded: Bucket quota exceeded";
        assert_eq!(error.to_string(), text);
    }
}
