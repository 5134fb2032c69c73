//! The checks of one VM: which operations work.

use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, OperationCheck, OperationVerdict, SupervisorRequest,
    VmName, send_request,
};

use crate::output::{FactPrinter, format_table};

/// Asks the supervisor of a VM to check it.
pub fn check_managed(name: &VmName) -> Result<Vec<OperationCheck>, Failure> {
    let base = crate::hidden::runtime_dir()?;
    let facts = send_request(&base, name, &SupervisorRequest::CheckOperations, &mut |_| ())
        .map_err(|failure| failure.while_doing(format!("can't check {name}")))?;
    serde_json::from_value(facts).while_doing("reading the checks")
}

/// Prints the checks. Fails if the VM can't be saved while it runs.
pub fn report_checks(checks: &[OperationCheck], out: FactPrinter) -> Result<(), Failure> {
    out.print_facts(&checks, || describe_checks(checks))?;
    let is_refused = |check: &&OperationCheck| check.verdict == OperationVerdict::Refused;
    match checks.first().filter(is_refused) {
        None => Ok(()),
        Some(_) => {
            let text = "a checkpoint of this VM while it runs is refused";
            Err(Failure::new(FailureKind::Refused, text))
        }
    }
}

fn describe_checks(checks: &[OperationCheck]) -> String {
    let row = |check: &OperationCheck| {
        let verdict = match check.verdict {
            OperationVerdict::Works => "ok",
            OperationVerdict::Limited => "LIMITED",
            OperationVerdict::Refused => "REFUSED",
        };
        let hint = check.hint.iter().map(|hint| format!("try: {hint}"));
        let why: Vec<String> = check.reasons.iter().cloned().chain(hint).collect();
        vec![verdict.to_owned(), check.operation.clone(), why.join("; ")]
    };
    format_table(&checks.iter().map(row).collect::<Vec<_>>())
}
