//! Certificates and keys, from directories laid out as Kubernetes' TLS secrets.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITY: &str = "ca.crt";
/// How often a changed certificate is looked for, while connections come.
const RECHECK: Duration = Duration::from_secs(10);

/// What the gateway shows to clients, and asks of them; read again when its files change.
#[derive(Debug)]
pub struct ServerTls {
    directory: PathBuf,
    current: Mutex<Current>,
}

#[derive(Debug)]
struct Current {
    config: Arc<ServerConfig>,
    stamp: Option<SystemTime>,
    checked: Instant,
}

impl ServerTls {
    /// Reads certificate and key; with `ca.crt` there, clients must show a certificate too.
    ///
    /// # Errors
    /// The file that cannot be used, with the reason; never what it holds.
    pub fn open(directory: &Path) -> Result<Self, String> {
        let current = Current {
            config: server_config(directory)?,
            stamp: stamp(directory),
            checked: Instant::now(),
        };
        Ok(Self { directory: directory.to_owned(), current: Mutex::new(current) })
    }

    /// Greets one connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.checked.elapsed() >= RECHECK {
            current.checked = Instant::now();
            let stamp = stamp(&self.directory);
            if stamp != current.stamp {
                match server_config(&self.directory) {
                    Ok(config) => {
                        tracing::info!("the certificate has changed");
                        current.config = config;
                        current.stamp = stamp;
                    }
                    // half a change is looked at again later
                    Err(error) => tracing::warn!(%error, "the new certificate cannot be used"),
                }
            }
        }
        TlsAcceptor::from(Arc::clone(&current.config))
    }
}

fn stamp(directory: &Path) -> Option<SystemTime> {
    let changed = |name| std::fs::metadata(directory.join(name)).ok()?.modified().ok();
    [CERTIFICATE, KEY, AUTHORITY].into_iter().filter_map(changed).max()
}

fn server_config(directory: &Path) -> Result<Arc<ServerConfig>, String> {
    let certificates = certificates(&directory.join(CERTIFICATE))?;
    let path = directory.join(KEY);
    let key = PrivateKeyDer::from_pem_file(&path).map_err(|error| shown(&path, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let authority = directory.join(AUTHORITY);
    let builder = if authority.exists() {
        let mut roots = RootCertStore::empty();
        for certificate in self::certificates(&authority)? {
            roots.add(certificate).map_err(|error| shown(&authority, &error))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        let verifier = verifier.build().map_err(|error| shown(&authority, &error))?;
        builder.with_client_cert_verifier(verifier)
    } else {
        builder.with_no_client_auth()
    };
    let mut config = builder
        .with_single_cert(certificates, key)
        .map_err(|error| format!("{} and its key: {error}", directory.display()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(|error| shown(path, &error))?
        .collect::<Result<_, _>>()
        .map_err(|error| shown(path, &error))?;
    if found.is_empty() {
        return Err(format!("{}: it holds no certificate", path.display()));
    }
    Ok(found)
}

fn shown(path: &Path, error: &impl std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

/// What is asked of workers, and shown to them if `tls.crt` and `tls.key` are there.
///
/// # Errors
/// The file that cannot be used.
pub fn worker_tls(directory: &Path) -> Result<ClientTlsConfig, String> {
    let read = |name: &str| {
        let path = directory.join(name);
        std::fs::read(&path).map_err(|error| shown(&path, &error))
    };
    // read once for its form: tonic would only complain at the first connection
    certificates(&directory.join(AUTHORITY))?;
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(AUTHORITY)?));
    if !directory.join(CERTIFICATE).exists() {
        return Ok(tls);
    }
    certificates(&directory.join(CERTIFICATE))?;
    let key = directory.join(KEY);
    PrivateKeyDer::from_pem_file(&key).map_err(|error| shown(&key, &error))?;
    Ok(tls.identity(Identity::from_pem(read(CERTIFICATE)?, read(KEY)?)))
}
