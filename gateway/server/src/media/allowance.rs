//! What the running requests of one tenant may have of media together.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Deserialize;

use crate::error::{ErrorKind, GatewayError};

/// Limits of one tenant, over all its requests at one time; nothing said is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MediaAllowance {
    /// Pictures.
    pub max_images: Option<u64>,
    /// Clips.
    pub max_videos: Option<u64>,
    /// Source bytes.
    pub max_bytes: Option<u64>,
    /// Tokens that stand for them in prompts.
    pub max_tokens: Option<u64>,
    /// Frames taken from clips.
    pub max_frames: Option<u64>,
    /// Pixels decoded, skipped frames included.
    pub max_decoded_pixels: Option<u64>,
    /// Seconds that clips last.
    pub max_video_s: Option<u64>,
}

/// Kinds of things that are counted.
const KINDS: usize = 7;
const NAMES: [&str; KINDS] = [
    "pictures",
    "clips",
    "source bytes",
    "tokens",
    "video frames",
    "decoded pixels",
    "seconds of video",
];

impl MediaAllowance {
    fn limits(&self) -> [Option<u64>; KINDS] {
        [
            self.max_images,
            self.max_videos,
            self.max_bytes,
            self.max_tokens,
            self.max_frames,
            self.max_decoded_pixels,
            self.max_video_s,
        ]
    }
}

/// How much of each kind, in the order of the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts(pub [u64; KINDS]);

/// What tenants with limits have now.
#[derive(Debug, Default)]
pub struct Accounts(Mutex<HashMap<String, Amounts>>);

/// What one request has; dropping it gives it back.
#[derive(Debug)]
pub struct Taken {
    accounts: Arc<Accounts>,
    tenant: String,
    amounts: Amounts,
}

impl Accounts {
    /// Counts a request's media to its tenant; `None` if nothing limits it.
    ///
    /// # Errors
    /// `MediaRejected` for what passes a limit by itself; `Overloaded` for what does so together
    /// with what the tenant's other requests have. Both name figure and limit.
    pub fn take(
        self: &Arc<Self>,
        tenant: &str,
        allowance: &MediaAllowance,
        amounts: Amounts,
    ) -> Result<Option<Taken>, GatewayError> {
        if *allowance == MediaAllowance::default() {
            return Ok(None);
        }
        let mut accounts = self.lock();
        let held = accounts.get(tenant).copied().unwrap_or_default();
        for (kind, limit) in allowance.limits().into_iter().enumerate() {
            let (Some(limit), name) = (limit, NAMES[kind]) else { continue };
            let (asked, held) = (amounts.0[kind], held.0[kind]);
            if asked > limit {
                let message = format!(
                    "the request's media have {asked} {name}; the tenant's requests may have \
                     {limit} at one time"
                );
                let mut error = GatewayError::new(ErrorKind::MediaRejected, message);
                error.code = "media_limit_exceeded";
                return Err(error);
            }
            if held.saturating_add(asked) > limit {
                let message = format!(
                    "the media of the tenant's running requests have {held} {name}; with \
                     {asked} more they would pass the limit of {limit}"
                );
                let mut error = GatewayError::new(ErrorKind::Overloaded, message);
                error.code = "rate_limit_exceeded";
                return Err(error.retry_after(1));
            }
        }
        let account = accounts.entry(tenant.to_owned()).or_default();
        for (sum, more) in account.0.iter_mut().zip(amounts.0) {
            *sum = sum.saturating_add(more);
        }
        let accounts = Arc::clone(self);
        Ok(Some(Taken { accounts, tenant: tenant.to_owned(), amounts }))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Amounts>> {
        // nothing panics while it is held
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut accounts = self.accounts.lock();
        let Some(account) = accounts.get_mut(&self.tenant) else { return };
        for (sum, less) in account.0.iter_mut().zip(self.amounts.0) {
            *sum = sum.saturating_sub(less);
        }
        // names alone take no memory
        if *account == Amounts::default() {
            accounts.remove(&self.tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn amounts(images: u64, bytes: u64) -> Amounts {
        Amounts([images, 0, bytes, 0, 0, 0, 0])
    }

    #[test]
    fn requests_of_one_tenant_share_its_limits_and_others_do_not() {
        let accounts = Arc::new(Accounts::default());
        let few = MediaAllowance { max_images: Some(3), ..MediaAllowance::default() };
        let take = |tenant, images| accounts.take(tenant, &few, amounts(images, 9));

        let first = take("a", 2).unwrap();
        let refused = take("a", 2).unwrap_err();
        assert_eq!((refused.kind, refused.retry_after_s), (ErrorKind::Overloaded, Some(1)));
        assert!(refused.message.contains("have 2 pictures"), "{refused}");
        assert!(refused.message.contains("limit of 3"), "{refused}");
        let second = take("a", 1).unwrap();
        assert!(take("b", 3).unwrap().is_some());
        let alone = take("c", 4).unwrap_err();
        assert_eq!((alone.kind, alone.code), (ErrorKind::MediaRejected, "media_limit_exceeded"));
        assert!(alone.message.contains("have 4 pictures"), "{alone}");

        drop((first, second));
        assert!(take("a", 3).unwrap().is_some());
        assert!(accounts.lock().is_empty(), "names alone take no memory");
    }

    #[test]
    fn every_kind_has_its_own_limit_and_without_any_nothing_is_counted() {
        let table: MediaAllowance = toml::from_str(
            "max_images = 1\nmax_videos = 2\nmax_bytes = 3\nmax_tokens = 4\nmax_frames = 5\n\
             max_decoded_pixels = 6\nmax_video_s = 7\n",
        )
        .unwrap();
        let accounts = Arc::new(Accounts::default());
        for (kind, name) in NAMES.into_iter().enumerate() {
            let mut asked = Amounts::default();
            asked.0[kind] = kind as u64 + 1;
            drop(accounts.take("a", &table, asked).unwrap().unwrap());
            asked.0[kind] += 1;
            let refused = accounts.take("a", &table, asked).unwrap_err();
            assert!(refused.message.contains(name), "{refused}");
        }
        let free = accounts.take("a", &MediaAllowance::default(), amounts(9, 9)).unwrap();
        assert!(free.is_none());
    }
}
