//! Which hosts and addresses media may be fetched from.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use url::{Host, Url};

use crate::error::{ErrorKind, GatewayError};

/// Ports that hold public web servers; any other is allowed only on hosts of the allow-list.
const WEB_PORTS: [u16; 2] = [80, 443];

/// The rule, as configured.
#[derive(Clone, Debug)]
pub struct AddressPolicy {
    /// Whether private and loopback addresses may be reached.
    pub allow_private: bool,
    /// Lower-case host names; empty allows any.
    pub allowed_hosts: Vec<String>,
}

impl AddressPolicy {
    /// Judges a URL before anything is resolved or dialled; every redirect passes here again.
    ///
    /// # Errors
    /// `InvalidRequest` saying what is not allowed.
    pub fn check_url(&self, url: &Url) -> Result<(), GatewayError> {
        let refuse = |message: String| {
            let mut error = GatewayError::new(ErrorKind::InvalidRequest, message);
            error.code = "media_url_refused";
            Err(error)
        };
        if !matches!(url.scheme(), "http" | "https") {
            return refuse(format!(
                "media URLs must be data:, http: or https:, got {}:",
                url.scheme()
            ));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return refuse("media URLs must not carry a user name or password".into());
        }
        let Some(host) = url.host() else {
            return refuse("the media URL names no host".into());
        };
        let is_listed = self.is_listed(&host);
        if !self.allowed_hosts.is_empty() && !is_listed {
            return refuse(format!(
                "media may not be fetched from {host}: it is not an allowed host"
            ));
        }
        let port = url.port_or_known_default().unwrap_or(0);
        if !WEB_PORTS.contains(&port) && !is_listed && !self.allow_private {
            return refuse(format!("media may not be fetched from port {port}, only 80 and 443"));
        }
        let literal = match host {
            Host::Ipv4(address) => Some(IpAddr::V4(address)),
            Host::Ipv6(address) => Some(IpAddr::V6(address)),
            Host::Domain(_) => None,
        };
        match literal {
            Some(address) if !self.allows(address) => refuse(format!(
                "media may not be fetched from {address}: it is not a public address"
            )),
            _ => Ok(()),
        }
    }

    fn is_listed(&self, host: &Host<&str>) -> bool {
        let host = host.to_string();
        // a trailing dot names the same host
        let host = host.trim_end_matches('.');
        self.allowed_hosts.iter().any(|allowed| allowed == host)
    }

    /// Whether a name need not resolve to be trusted: it was allowed by name, or everything is.
    pub fn knows(&self, url: &Url) -> bool {
        self.allow_private || url.host().is_some_and(|host| self.is_listed(&host))
    }

    /// Whether an address may be dialled.
    pub fn allows(&self, address: IpAddr) -> bool {
        self.allow_private || is_public(address)
    }
}

/// Whether an address is global unicast and not reserved for anything else.
///
/// Source: the IANA special-purpose address registries for IPv4 and IPv6.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    const SPECIAL: [(Ipv4Addr, u32); 15] = [
        (Ipv4Addr::new(0, 0, 0, 0), 8),
        (Ipv4Addr::new(10, 0, 0, 0), 8),
        (Ipv4Addr::new(100, 64, 0, 0), 10),
        (Ipv4Addr::new(127, 0, 0, 0), 8),
        // azure's wire server answers virtual machines at this otherwise public address
        (Ipv4Addr::new(168, 63, 129, 16), 32),
        (Ipv4Addr::new(169, 254, 0, 0), 16),
        (Ipv4Addr::new(172, 16, 0, 0), 12),
        (Ipv4Addr::new(192, 0, 0, 0), 24),
        (Ipv4Addr::new(192, 0, 2, 0), 24),
        (Ipv4Addr::new(192, 88, 99, 0), 24),
        (Ipv4Addr::new(192, 168, 0, 0), 16),
        (Ipv4Addr::new(198, 18, 0, 0), 15),
        (Ipv4Addr::new(198, 51, 100, 0), 24),
        (Ipv4Addr::new(203, 0, 113, 0), 24),
        (Ipv4Addr::new(224, 0, 0, 0), 3),
    ];
    let bits = u32::from(address);
    !SPECIAL.iter().any(|(network, prefix)| (bits ^ u32::from(*network)) >> (32 - prefix) == 0)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    // everything that embeds an IPv4 address (mapped, NAT64, 6to4, Teredo) is refused as such:
    // who holds a public IPv4 address can be reached by it
    const SPECIAL: [(Ipv6Addr, u32); 4] = [
        (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
        (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
        (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
        (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
    ];
    let bits = u128::from(address);
    let is_global_unicast = bits >> 125 == 0b001;
    is_global_unicast
        && !SPECIAL
            .iter()
            .any(|(network, prefix)| (bits ^ u128::from(*network)) >> (128 - prefix) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allow_private: bool, hosts: &[&str]) -> AddressPolicy {
        let allowed_hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        AddressPolicy { allow_private, allowed_hosts }
    }

    fn is_allowed(policy: &AddressPolicy, url: &str) -> bool {
        Url::parse(url).is_ok_and(|url| policy.check_url(&url).is_ok())
    }

    #[test]
    fn every_way_to_write_an_inner_address_is_refused() {
        for host in [
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "0",
            "10.0.0.1",
            "100.64.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "192.0.0.192",
            "198.18.0.1",
            "168.63.129.16",
            "224.0.0.1",
            "255.255.255.255",
            "[::1]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::ffff:8.8.8.8]",
            "[::127.0.0.1]",
            "[64:ff9b::7f00:1]",
            "[64:ff9b:1::1]",
            "[2002:7f00:1::]",
            "[2001:0:1::1]",
            "[2001:db8::1]",
            "[fc00::1]",
            "[fd00:ec2::254]",
            "[fe80::1]",
            "[ff02::1]",
            "１２７.0.0.1",
        ] {
            assert!(!is_allowed(&policy(false, &[]), &format!("http://{host}/a.png")), "{host}");
        }
    }

    #[test]
    fn public_addresses_and_names_pass() {
        for host in ["8.8.8.8", "172.32.0.1", "100.128.0.1", "[2606:4700::1111]", "example.com"] {
            assert!(is_allowed(&policy(false, &[]), &format!("https://{host}/a.png")), "{host}");
        }
    }

    #[test]
    fn tricks_with_schemes_users_and_backslashes_are_refused() {
        for url in [
            "file:///etc/hostname",
            "ftp://example.com/a.png",
            "gopher://example.com/",
            "http://allowed.example@127.0.0.1/a.png",
            "http://user:secret@example.com/a.png",
            "http://127.0.0.1:1\\@allowed.example/a.png",
            "http://example.com:22/",
        ] {
            assert!(!is_allowed(&policy(false, &[]), url), "{url}");
        }
    }

    #[test]
    fn a_list_of_hosts_shuts_out_all_others_and_opens_any_port() {
        let listed = policy(false, &["images.example.com"]);
        assert!(is_allowed(&listed, "https://images.example.com:8443/a.png"));
        assert!(is_allowed(&listed, "https://IMAGES.example.com./a.png"));
        assert!(!is_allowed(&listed, "https://evil.example.com/a.png"));
        assert!(!is_allowed(&listed, "https://images.example.com.evil.com/a.png"));
    }

    #[test]
    fn a_listed_host_does_not_open_private_addresses() {
        assert!(!is_allowed(&policy(false, &["127.0.0.1"]), "http://127.0.0.1:9/a.png"));
        assert!(is_allowed(&policy(true, &[]), "http://127.0.0.1:9/a.png"));
    }
}
