//! etcd behind TLS, with certificates of both sides.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use firn_membership::etcd::{EtcdOptions, EtcdTls};
use firn_membership::{ClusterName, EtcdStore, MembershipError, MembershipStore as _};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};

use crate::servers::{TERMS, eventually};

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes an authority, and a certificate and key of it.
fn certificates(dir: &Path) -> [PathBuf; 3] {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    let paths = ["ca.pem", "a.pem", "a.key"].map(|name| dir.join(name));
    for (path, pem) in paths.iter().zip([authority.pem(), certificate.pem(), key.serialize_pem()]) {
        std::fs::write(path, pem).unwrap();
    }
    paths
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn serve(dir: &Path, [authority, certificate, key]: &[PathBuf; 3]) -> (Server, String) {
    let [client, peer] =
        [format!("https://127.0.0.1:{}", free_port()), format!("http://127.0.0.1:{}", free_port())];
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(dir.join("state")).arg("--client-cert-auth");
    command.arg("--trusted-ca-file").arg(authority);
    command.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}")]);
    (Server(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()), client)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_of_both_sides_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let own = certificates(dir.path());
    let (_server, endpoint) = serve(dir.path(), &own);
    let [authority, certificate, key] = own;
    let options =
        |tls| EtcdOptions { endpoints: vec![endpoint.clone()], prefix: "firn".into(), tls };
    let web = ClusterName::new("web").unwrap();
    let shown = EtcdTls { authority: authority.clone(), certificate: Some((certificate, key)) };
    let good = EtcdStore::connect(&options(Some(shown.clone())), TERMS).await.unwrap();
    eventually("it answers", async || good.read_record(&web).await.ok()).await;

    let silent = EtcdTls { authority, certificate: None };
    let silent = EtcdStore::connect(&options(Some(silent)), TERMS).await.unwrap();
    assert!(matches!(silent.read_record(&web).await, Err(MembershipError::Unreachable(_))));

    let strangers = tempfile::tempdir().unwrap();
    let [authority, ..] = certificates(strangers.path());
    let strange = EtcdTls { authority, ..shown.clone() };
    let strange = EtcdStore::connect(&options(Some(strange)), TERMS).await.unwrap();
    assert!(matches!(strange.read_record(&web).await, Err(MembershipError::Unreachable(_))));

    let missing = EtcdTls { authority: dir.path().join("none.pem"), certificate: None };
    let Err(MembershipError::Refused(why)) =
        EtcdStore::connect(&options(Some(missing)), TERMS).await
    else {
        panic!("it connects")
    };
    assert!(why.contains("none.pem"), "{why}");
}
