//! TLS towards Postgres: rustls with ring, TLS 1.2 or newer, and never a fall-back to plain text.
//!
//! `verify-full` checks chain and name, `verify-ca` the chain alone. `prefer` and `require` do not exist here: they
//! encrypt towards whoever answers. Roots come from `sslrootcert`, or are Mozilla's.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres::Socket;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::config::pg_url::SslMode;
use crate::error::{Context, Error, Result};

/// The client side of TLS; reads `root_file` now, so that a renewed CA is picked up by the next connect.
///
/// # Errors
/// The file cannot be read or holds no certificate.
pub(super) fn client_config(mode: SslMode, root_file: Option<&Path>) -> Result<ClientConfig> {
    // Named here, never taken from the process default, which another crate may have set.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .context(|| "set up TLS".into())?;
    let builder = match mode {
        // Never used for a handshake; it lets one connection type serve every mode.
        SslMode::Disable => builder.with_root_certificates(RootCertStore::empty()),
        SslMode::VerifyFull => builder.with_root_certificates(roots(root_file)?),
        SslMode::VerifyCa => {
            let roots = Arc::new(roots(root_file)?);
            let chain = WebPkiServerVerifier::builder_with_provider(roots, provider)
                .build()
                .context(|| "set up TLS: verify-ca".into())?;
            builder.dangerous().with_custom_certificate_verifier(Arc::new(ChainOnly(chain)))
        }
    };
    Ok(builder.with_no_client_auth())
}

fn roots(file: Option<&Path>) -> Result<RootCertStore> {
    let Some(file) = file else {
        return Ok(RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() });
    };
    if file == Path::new("system") {
        return Err(Error::config("sslrootcert=system is not supported")
            .hint("name the file, such as /etc/ssl/certs/ca-certificates.crt"));
    }
    let unreadable = |source| Error::config(format!("read sslrootcert \"{}\"", file.display())).source_is(source);
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(unreadable)? {
        let added = roots.add(certificate.map_err(unreadable)?);
        added.map_err(|source| {
            Error::config(format!("use a certificate of sslrootcert \"{}\"", file.display())).source_is(source)
        })?;
    }
    if roots.is_empty() {
        return Err(Error::config(format!("sslrootcert \"{}\" holds no certificate", file.display())));
    }
    Ok(roots)
}

/// `verify-ca`: everything that `verify-full` checks, except the name.
#[derive(Debug)]
struct ChainOnly(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for ChainOnly {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The name is checked last: chain, dates and usage passed when this is the error.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// How far a connect got, so that its error or its timeout can name the step.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<AtomicU8>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Step {
    Connect = 0,
    Tls = 1,
    Authenticate = 2,
}

impl Progress {
    pub(super) fn step(&self) -> Step {
        match self.0.load(Ordering::Relaxed) {
            0 => Step::Connect,
            1 => Step::Tls,
            _ => Step::Authenticate,
        }
    }

    pub(super) fn reach(&self, step: Step) {
        self.0.store(step as u8, Ordering::Relaxed);
    }
}

/// The rustls connector, noting its progress.
pub(super) struct Watched {
    pub(super) inner: MakeRustlsConnect,
    pub(super) encrypted: bool,
    pub(super) progress: Progress,
}

pub(super) struct WatchedConnect {
    inner: <MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect,
    progress: Progress,
}

type Stream = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream;

impl MakeTlsConnect<Socket> for Watched {
    type Stream = Stream;
    type TlsConnect = WatchedConnect;
    type Error = std::convert::Infallible;

    /// Called when the TCP connection stands, before the first byte is sent.
    fn make_tls_connect(&mut self, domain: &str) -> Result<WatchedConnect, Self::Error> {
        self.progress.reach(if self.encrypted { Step::Tls } else { Step::Authenticate });
        let inner = MakeTlsConnect::<Socket>::make_tls_connect(&mut self.inner, domain)?;
        Ok(WatchedConnect { inner, progress: self.progress.clone() })
    }
}

impl TlsConnect<Socket> for WatchedConnect {
    type Stream = Stream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Stream>> + Send>>;

    fn connect(self, stream: Socket) -> Self::Future {
        Box::pin(async move {
            let stream = self.inner.connect(stream).await?;
            self.progress.reach(Step::Authenticate);
            Ok(stream)
        })
    }
}
