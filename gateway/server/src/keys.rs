//! API keys: who may ask, on whose behalf, and who may operate. Read from a file, read anew when
//! it changes; only digests of the keys stay in memory.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

/// How often the file is looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// A shorter key could be guessed.
const MIN_KEY_BYTES: usize = 16;
const MAX_NAME_BYTES: usize = 128;

/// What a key's owner may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Ask the model.
    #[default]
    User,
    /// The same, and operate the gateway.
    Admin,
}

/// Who presented a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// On whose behalf; limits and caches are by tenant.
    pub tenant: String,
    /// What the key allows.
    pub role: Role,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    #[serde(default)]
    keys: Vec<RawKey>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawKey {
    name: String,
    key: Option<String>,
    sha256: Option<String>,
    tenant: Option<String>,
    #[serde(default)]
    role: Role,
}

struct Entry {
    digest: [u8; 32],
    caller: Caller,
}

/// The keys of one file.
#[derive(Default)]
struct KeyTable(Vec<Entry>);

impl KeyTable {
    /// Every message names the entry, none repeats a key: the parser's own words may quote the
    /// line at fault, so only its place is told.
    fn parse(text: &str) -> Result<Self, String> {
        let file: RawFile = toml::from_str(text).map_err(|error| {
            let place = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            format!(
                "line {place} is not as expected: tables [[keys]] with name, key or sha256, \
                 and optionally tenant and role (\"user\", \"admin\")"
            )
        })?;
        if file.keys.is_empty() {
            return Err("it names no key; expected at least one table [[keys]]".into());
        }
        let (mut names, mut digests) = (HashSet::new(), HashSet::new());
        let mut entries = Vec::with_capacity(file.keys.len());
        for (place, raw) in file.keys.into_iter().enumerate() {
            let shown = format!("key {} ({:?})", place + 1, raw.name);
            if !names.insert(raw.name.clone()) {
                return Err(format!("{shown}: the name is there twice"));
            }
            let entry = entry(raw).map_err(|error| format!("{shown}: {error}"))?;
            if !digests.insert(entry.digest) {
                return Err(format!("{shown}: the same key is there twice"));
            }
            entries.push(entry);
        }
        Ok(Self(entries))
    }

    /// Looks at every entry whatever it finds, so that the time tells nothing about any.
    fn caller(&self, presented: &str) -> Option<Caller> {
        let digest: [u8; 32] = Sha256::digest(presented.as_bytes()).into();
        let mut found = None;
        for entry in &self.0 {
            let is_same: Choice = entry.digest.ct_eq(&digest);
            if bool::from(is_same) {
                found = Some(&entry.caller);
            }
        }
        found.cloned()
    }
}

fn entry(raw: RawKey) -> Result<Entry, String> {
    let tenant = raw.tenant.unwrap_or_else(|| raw.name.clone());
    for (field, text) in [("name", &raw.name), ("tenant", &tenant)] {
        if text.is_empty() || text.len() > MAX_NAME_BYTES {
            return Err(format!(
                "{field} has {} bytes, expected 1 to {MAX_NAME_BYTES}",
                text.len()
            ));
        }
    }
    let digest = match (raw.key, raw.sha256) {
        (Some(key), None) => {
            if key.len() < MIN_KEY_BYTES {
                let length = key.len();
                return Err(format!(
                    "the key has {length} bytes, expected at least {MIN_KEY_BYTES}"
                ));
            }
            if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err("the key holds characters that no header can carry".into());
            }
            Sha256::digest(key.as_bytes()).into()
        }
        (None, Some(hex)) => digest_of_hex(&hex).ok_or_else(|| {
            format!("sha256 has {} characters, expected 64 hex digits", hex.len())
        })?,
        _ => return Err("expected either key or sha256".into()),
    };
    Ok(Entry { digest, caller: Caller { tenant, role: raw.role } })
}

fn digest_of_hex(hex: &str) -> Option<[u8; 32]> {
    if hex.len() != 64 || !hex.is_ascii() {
        return None;
    }
    let mut digest = [0; 32];
    for (place, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * place..2 * place + 2], 16).ok()?;
    }
    Some(digest)
}

/// The keys that hold now.
pub struct KeyRing {
    path: PathBuf,
    table: RwLock<Arc<KeyTable>>,
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("KeyRing").field("path", &self.path).finish_non_exhaustive()
    }
}

impl KeyRing {
    /// Reads the file and follows its changes while the ring lives; needs a running tokio runtime.
    ///
    /// # Errors
    /// What is wrong with the file, and where; never a key.
    pub fn open(path: &Path) -> Result<Arc<Self>, String> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{shown}: {error}"))?;
        let table = KeyTable::parse(&text).map_err(|error| format!("{shown}: {error}"))?;
        let table = RwLock::new(Arc::new(table));
        let ring = Arc::new(Self { path: path.to_owned(), table });
        tokio::spawn(follow(Arc::downgrade(&ring), text));
        Ok(ring)
    }

    /// Whose key that is; `None` if nobody's.
    pub fn caller(&self, presented: &str) -> Option<Caller> {
        let table = Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner));
        table.caller(presented)
    }
}

/// Takes over each new text of the file. One that cannot be read or used changes nothing: the old
/// keys go on, and the log says why once.
async fn follow(ring: Weak<KeyRing>, mut last: String) {
    let mut complaint = String::new();
    loop {
        tokio::time::sleep(INTERVAL).await;
        let Some(path) = ring.upgrade().map(|ring| ring.path.clone()) else { return };
        let outcome = match tokio::fs::read_to_string(&path).await {
            Ok(text) if text == last => continue,
            Ok(text) => {
                let outcome = KeyTable::parse(&text);
                last = text;
                outcome
            }
            Err(error) => Err(error.to_string()),
        };
        match outcome {
            Ok(table) => {
                let Some(ring) = ring.upgrade() else { return };
                tracing::info!(path = %path.display(), keys = table.0.len(), "API keys read anew");
                *ring.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
                complaint.clear();
            }
            Err(error) if error != complaint => {
                tracing::warn!(path = %path.display(), %error, "the old API keys stay");
                complaint = error;
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "sk-0123456789abcdef";

    fn refusal(text: &str) -> String {
        KeyTable::parse(text).err().unwrap()
    }

    #[test]
    fn a_key_names_its_tenant_and_its_role() {
        let hex: String = Sha256::digest(b"sk-another-long-key")
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let table = KeyTable::parse(&format!(
            "[[keys]]\nname = \"ci\"\nkey = \"{KEY}\"\n\
             [[keys]]\nname = \"ops\"\nsha256 = \"{hex}\"\ntenant = \"house\"\nrole = \"admin\"\n"
        ))
        .unwrap();
        let ci = Caller { tenant: "ci".into(), role: Role::User };
        let ops = Caller { tenant: "house".into(), role: Role::Admin };
        assert_eq!(table.caller(KEY), Some(ci));
        assert_eq!(table.caller("sk-another-long-key"), Some(ops));
        for stranger in ["", "sk-", "sk-0123456789abcdeF", "sk-0123456789abcdef ", &hex] {
            assert_eq!(table.caller(stranger), None, "{stranger:?}");
        }
    }

    #[test]
    fn a_file_that_is_wrong_is_refused_without_telling_a_key() {
        for (text, expected) in [
            ("", "names no key"),
            ("[[keys]]\nname = \"a\"\n", "either key or sha256"),
            (
                "[[keys]]\nname = \"a\"\nkey = \"sk-secret-short\"\n",
                "15 bytes, expected at least 16",
            ),
            ("[[keys]]\nname = \"a\"\nkey = \"sk-secret with a blank\"\n", "no header can carry"),
            ("[[keys]]\nname = \"a\"\nsha256 = \"abc\"\n", "64 hex digits"),
            (
                "[[keys]]\nname = \"a\"\nkey = \"sk-secret-long-enough\"\nrole = \"king\"\n",
                "line 4",
            ),
            ("[[keys]]\nname = \"a\"\nkye = \"sk-secret-long-enough\"\n", "line 3"),
            ("sk-secret-long-enough\n", "line 1"),
            ("[[keys]]\nname = \"\"\nkey = \"sk-secret-long-enough\"\n", "name has 0 bytes"),
        ] {
            let message = refusal(text);
            assert!(message.contains(expected), "{text:?}: {message}");
            assert!(!message.contains("sk-secret"), "{text:?}: {message}");
        }
        let one = format!("[[keys]]\nname = \"a\"\nkey = \"{KEY}\"\n");
        let same_name = one.replace("abcdef", "fedcba");
        assert!(refusal(&format!("{one}{same_name}")).contains("the name is there twice"));
        let same_key = one.replace("\"a\"", "\"b\"");
        assert!(refusal(&format!("{one}{same_key}")).contains("the same key is there twice"));
    }
}
