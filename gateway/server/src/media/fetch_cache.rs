//! Which bodies from the network may be used again, for how long, and how to ask whether they
//! still hold: what HTTP says to a shared cache (RFC 9111), and not a second more.

use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{
    AGE, CACHE_CONTROL, ETAG, HeaderMap, HeaderName, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH,
    LAST_MODIFIED, VARY,
};
use tokio::time::Instant;

/// Longest time for which an origin is believed.
const MAX_FRESH: Duration = Duration::from_secs(24 * 3600);

/// A body, and the terms on which it may be used again.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The body.
    pub bytes: Bytes,
    fresh_until: Instant,
    etag: Option<HeaderValue>,
    last_modified: Option<HeaderValue>,
}

impl Stored {
    /// What to keep of a whole successful reply to a plain GET; `None` if it must not be kept, or
    /// could never be used again.
    pub fn of(headers: &HeaderMap, bytes: Bytes, now: Instant) -> Option<Self> {
        let directives = directives(headers);
        let has = |name: &str| directives.iter().any(|(found, _)| found == name);
        let varies = headers.get_all(VARY).iter().any(|value| value.as_bytes().contains(&b'*'));
        if has("no-store") || has("private") || varies {
            return None;
        }
        let etag = headers.get(ETAG).cloned();
        let last_modified = headers.get(LAST_MODIFIED).cloned();
        let life = if has("no-cache") { Duration::ZERO } else { freshness(headers, &directives) };
        let is_useful = !life.is_zero() || etag.is_some() || last_modified.is_some();
        is_useful.then(|| Self { bytes, fresh_until: now + life, etag, last_modified })
    }

    /// Whether it may be used without asking.
    pub fn is_fresh(&self, now: Instant) -> bool {
        now < self.fresh_until
    }

    /// The headers that ask the origin whether it still holds.
    pub fn question(&self) -> impl Iterator<Item = (HeaderName, &HeaderValue)> {
        let by_tag = self.etag.as_ref().map(|value| (IF_NONE_MATCH, value));
        let by_date = self.last_modified.as_ref().map(|value| (IF_MODIFIED_SINCE, value));
        by_tag.into_iter().chain(by_date)
    }

    /// The same body on the terms of a reply that said it still holds (304); the old validators
    /// stay where the reply brings none.
    pub fn renewed(&self, headers: &HeaderMap, now: Instant) -> Option<Self> {
        let mut renewed = Self::of(headers, self.bytes.clone(), now).or_else(|| {
            let is_forbidden =
                directives(headers).iter().any(|(name, _)| name == "no-store" || name == "private");
            (!is_forbidden).then(|| Self { fresh_until: now, ..self.clone() })
        })?;
        renewed.etag = renewed.etag.or_else(|| self.etag.clone());
        renewed.last_modified = renewed.last_modified.or_else(|| self.last_modified.clone());
        Some(renewed)
    }
}

/// Directives of `Cache-Control`, names in lower case.
fn directives(headers: &HeaderMap) -> Vec<(String, Option<String>)> {
    let values = headers.get_all(CACHE_CONTROL).iter().filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .map(|part| {
            let (name, argument) = part.split_once('=').map_or((part, None), |(name, argument)| {
                (name, Some(argument.trim().trim_matches('"').to_owned()))
            });
            (name.trim().to_ascii_lowercase(), argument)
        })
        .collect()
}

/// Time left in which the reply is fresh. Only what is said outright counts: no guess from dates.
fn freshness(headers: &HeaderMap, directives: &[(String, Option<String>)]) -> Duration {
    let seconds = |name: &str| {
        let found = directives.iter().find(|(directive, _)| directive == name)?;
        // a figure that cannot be read is stale
        Some(found.1.as_deref().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0))
    };
    let life = seconds("s-maxage").or_else(|| seconds("max-age")).unwrap_or(0);
    let age = headers.get(AGE).and_then(|value| value.to_str().ok());
    let age = age.map_or(0, |text| text.trim().parse::<u64>().unwrap_or(u64::MAX));
    Duration::from_secs(life.saturating_sub(age)).min(MAX_FRESH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    fn stored(lines: &[(&'static str, &'static str)]) -> Option<(u64, usize)> {
        let now = Instant::now();
        let stored = Stored::of(&headers(lines), Bytes::from_static(b"x"), now)?;
        Some(((stored.fresh_until - now).as_secs(), stored.question().count()))
    }

    #[test]
    fn only_what_http_allows_a_shared_cache_is_kept() {
        for (lines, expected) in [
            (vec![], None),
            (vec![("cache-control", "max-age=60")], Some((60, 0))),
            (vec![("cache-control", "public, Max-Age=\"60\"")], Some((60, 0))),
            (vec![("cache-control", "max-age=60, s-maxage=5")], Some((5, 0))),
            (vec![("cache-control", "max-age=60"), ("age", "45")], Some((15, 0))),
            (vec![("cache-control", "max-age=60"), ("age", "90")], None),
            (vec![("cache-control", "max-age=60, no-store")], None),
            (vec![("cache-control", "private, max-age=60")], None),
            (vec![("cache-control", "max-age=60"), ("vary", "*")], None),
            (vec![("cache-control", "max-age=60"), ("vary", "accept")], Some((60, 0))),
            (vec![("cache-control", "no-cache, max-age=60")], None),
            (vec![("cache-control", "no-cache"), ("etag", "\"a\"")], Some((0, 1))),
            (vec![("etag", "\"a\""), ("last-modified", "yesterday")], Some((0, 2))),
            (vec![("cache-control", "max-age=nonsense")], None),
            (vec![("cache-control", "max-age=99999999999")], Some((86400, 0))),
            (vec![("expires", "Thu, 01 Jan 2099 00:00:00 GMT")], None),
        ] {
            assert_eq!(stored(&lines), expected, "{lines:?}");
        }
    }

    #[test]
    fn what_still_holds_takes_the_new_terms_and_keeps_its_validators() {
        let now = Instant::now();
        let first = headers(&[("etag", "\"a\"")]);
        let stored = Stored::of(&first, Bytes::from_static(b"x"), now).unwrap();
        assert!(!stored.is_fresh(now));

        let renewed = stored.renewed(&headers(&[("cache-control", "max-age=9")]), now).unwrap();
        assert!(renewed.is_fresh(now) && !renewed.is_fresh(now + Duration::from_secs(9)));
        assert_eq!(renewed.question().next().unwrap().1, "\"a\"");

        assert!(stored.renewed(&headers(&[]), now).is_some_and(|stored| !stored.is_fresh(now)));
        assert!(stored.renewed(&headers(&[("cache-control", "no-store")]), now).is_none());
    }
}
