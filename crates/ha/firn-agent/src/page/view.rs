//! What the page shows, and how it is collected.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use firn_control::api::AgentStatus;
use firn_supervisor::{Failure, FailureKind, VmName};
use tokio::sync::Mutex;

use super::access::{Entrance, PageToken};
use super::chains::{ChainFile, LinkCache};
use super::restores::{self, RestoreSummary};
use crate::agent::Agent;
use crate::history::ProtectionHistory;
use crate::membership::MembershipHealth;
use crate::vms::LocalVms;
use crate::watch;

/// How long what was read from files is shown before it is read again.
const FILES_AGE_MAX: Duration = Duration::from_secs(10);

/// What the page shows.
#[derive(Clone, Debug)]
pub struct PageView {
    /// All hosts and VMs.
    pub status: Arc<AgentStatus>,
    /// The hosts' consensus, if this host takes part in one.
    pub membership: Option<MembershipHealth>,
    /// Lag and pauses.
    pub history: ProtectionHistory,
    /// The present, by the clock of the history.
    pub now: Duration,
    /// The present, in seconds since 1970.
    pub now_s: u64,
    /// What was read from the files of this host's VMs.
    pub files: Arc<VmFiles>,
    /// What actions need, if they are allowed here.
    pub token: Option<PageToken>,
}

/// What the page reads from files of this host's VMs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmFiles {
    /// The images that a checkpoint consists of: itself, its parent, and so on.
    pub chains: BTreeMap<String, Vec<ChainFile>>,
    /// The newest restore of each VM.
    pub restores: BTreeMap<VmName, RestoreSummary>,
}

/// The page of an agent, and what it has read lately.
#[derive(Default)]
pub(crate) struct AgentPage {
    /// What actions need, if the configuration allows them.
    pub(crate) token: Option<PageToken>,
    files: Mutex<KeptFiles>,
}

#[derive(Default)]
struct KeptFiles {
    read: Option<(Instant, Arc<VmFiles>)>,
    links: LinkCache,
}

impl AgentPage {
    /// A page that can act. Its token is new with each start of the agent.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(crate) fn with_actions() -> Result<Self, Failure> {
        let random = rustls::crypto::ring::default_provider().secure_random;
        let token = PageToken::from_random(|bytes| random.fill(bytes).is_ok());
        match token {
            Some(token) => Ok(Self { token: Some(token), ..Self::default() }),
            None => Err(Failure::new(FailureKind::Host, "the system has no random numbers")),
        }
    }
}

/// Collects what the page shows.
pub(super) async fn collect_view(
    agent: &Arc<Agent>,
    entrance: Entrance,
) -> Result<PageView, Failure> {
    let status = watch::recent_status(agent).await?;
    let (history, now) = agent.observations.history();
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(PageView {
        files: read_files(agent, &status).await?,
        status,
        membership: agent.observations.membership(),
        history,
        now,
        now_s: since_1970.as_secs(),
        token: agent.page.token.clone().filter(|_| entrance.may_act()),
    })
}

/// Reads images and run records of this host's VMs. Several pages share what was read.
async fn read_files(agent: &Arc<Agent>, status: &AgentStatus) -> Result<Arc<VmFiles>, Failure> {
    let mut kept = agent.page.files.lock().await;
    if let Some((_, files)) = kept.read.as_ref().filter(|(at, _)| at.elapsed() < FILES_AGE_MAX) {
        return Ok(Arc::clone(files));
    }
    let before = kept.read.as_ref().map(|(_, files)| Arc::clone(files)).unwrap_or_default();
    let local = status.vms.iter().filter(|vm| vm.host == status.host);
    let (mut images, mut vms) = (Vec::new(), Vec::new());
    for vm in local {
        images.extend(vm.checkpoints.newest.iter().map(|note| note.image.clone()));
        vms.push(vm.name.clone());
    }
    let runtime_dir = agent.paths.runtime_dir().clone();
    let mut links = std::mem::take(&mut kept.links);
    let read = move |_: &dyn LocalVms| {
        let chains = links.read_chains(images);
        let restores = vms.into_iter().filter_map(|vm| {
            let file = runtime_dir.vm_dir(&vm).run_record();
            Some((vm.clone(), restores::read_summary(&file, before.restores.get(&vm))?))
        });
        let restores = restores.collect();
        Ok((VmFiles { chains, restores }, links))
    };
    let (files, links) = agent.run_blocking(read).await?;
    let files = Arc::new(files);
    *kept = KeptFiles { read: Some((Instant::now(), Arc::clone(&files))), links };
    Ok(files)
}
