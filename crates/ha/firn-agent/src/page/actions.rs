//! Actions of the page: the requests of `firn move`, `firn failover` and `firn agent drain`.

use std::sync::Arc;

use firn_supervisor::{Failure, FailureKind};
use hyper::Request;
use hyper::body::Incoming;

use super::access::Entrance;
use crate::agent::Agent;
use crate::http::{self, HttpResponse};
use crate::replies::answer_with_progress;
use crate::{clusters, moves};

/// Starts the action of that name, if this request may. It continues when the client disconnects,
/// except for a failover, which the record continues.
pub(super) async fn answer_action(
    agent: Arc<Agent>,
    entrance: Entrance,
    action: &str,
    request: Request<Incoming>,
) -> HttpResponse {
    if let Err(failure) = check_action(&agent, entrance, action, &request) {
        tracing::warn!("an action of the page is refused: {failure}");
        return http::failure_response(&failure);
    }
    tracing::warn!("the page requests an action: {action}");
    match action {
        "move" => match http::read_json(request).await {
            Ok(wanted) => answer_with_progress(|progress| async move {
                moves::move_vm(&agent, wanted, &progress).await
            }),
            Err(failure) => http::failure_response(&failure),
        },
        "drain" => match http::read_json(request).await {
            Ok(wanted) => answer_with_progress(|progress| async move {
                moves::drain_host(&agent, wanted, &progress).await
            }),
            Err(failure) => http::failure_response(&failure),
        },
        "failover" => match http::read_json(request).await {
            Ok(wanted) => match clusters::manual::fail_over(&agent, &wanted).await {
                Ok(facts) => http::json_response(&facts),
                Err(failure) => http::failure_response(&failure),
            },
            Err(failure) => http::failure_response(&failure),
        },
        _ => http::not_found_response(&request),
    }
}

fn check_action(
    agent: &Agent,
    entrance: Entrance,
    action: &str,
    request: &Request<Incoming>,
) -> Result<(), Failure> {
    let Some(token) = &agent.page.token else {
        let failure = Failure::new(FailureKind::Refused, "actions of the page are off");
        return Err(failure.with_hint("`page-actions = true` in the configuration allows them"));
    };
    token
        .check_action(entrance, request.headers())
        .map_err(|why| Failure::new(FailureKind::Refused, format!("no {action}: {why}")))
}
