//! Limits by tenant: requests at once, and tokens a minute by a bucket that may run into debt.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Deserialize;

use crate::error::{ErrorKind, GatewayError};
use crate::media::MediaAllowance;

/// Accounts kept before those that nobody needs are looked for.
const MAX_IDLE_ACCOUNTS: usize = 1024;

/// What one tenant may have; nothing said is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantLimits {
    /// Requests served at once.
    pub max_concurrent_requests: Option<u32>,
    /// Tokens of prompts and replies in a minute; as many can be had at once after a pause.
    pub tokens_per_minute: Option<u64>,
    /// Media of all its running requests together.
    pub media: MediaAllowance,
}

impl TenantLimits {
    /// Whether there is an account of its requests and tokens.
    fn is_counted(&self) -> bool {
        self.max_concurrent_requests.is_some() || self.tokens_per_minute.is_some()
    }
}

/// The file of limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitTable {
    /// For every tenant that is not named, each on its own.
    #[serde(rename = "default")]
    pub default_limits: TenantLimits,
    /// By name; these hold instead of the default, not beside it.
    pub tenants: HashMap<String, TenantLimits>,
}

impl LimitTable {
    /// Reads the file.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn read(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{shown}: {error}"))?;
        let table: Self = toml::from_str(&text).map_err(|error| format!("{shown}: {error}"))?;
        let named = table.tenants.iter().map(|(name, limits)| (name.as_str(), limits));
        for (name, limits) in named.chain([("default", &table.default_limits)]) {
            if limits.max_concurrent_requests == Some(0) || limits.tokens_per_minute == Some(0) {
                return Err(format!("{shown}: the limits of {name} must be at least 1, got 0"));
            }
        }
        Ok(table)
    }

    fn limits(&self, tenant: &str) -> TenantLimits {
        self.tenants.get(tenant).copied().unwrap_or(self.default_limits)
    }
}

/// What a tenant has left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allowance {
    /// Its limits.
    pub limits: TenantLimits,
    /// Requests it may still begin now.
    pub remaining_requests: u32,
    /// Tokens it may still use now.
    pub remaining_tokens: u64,
    /// Until its bucket is full again.
    pub full_after_s: f64,
}

#[derive(Debug)]
struct Account {
    running: u32,
    /// Tokens to spend; below 0 while in debt.
    balance: f64,
    as_of: Instant,
}

impl Account {
    fn refill(&mut self, limits: TenantLimits, now: Instant) {
        let Some(rate) = limits.tokens_per_minute.map(|tokens| tokens as f64) else { return };
        let gained = (now - self.as_of).as_secs_f64() * rate / 60.0;
        self.balance = (self.balance + gained).min(rate);
        self.as_of = now;
    }
}

/// The accounts of all tenants that are in debt or have requests; the others need none.
#[derive(Debug, Default)]
pub struct Tenants {
    table: LimitTable,
    accounts: Mutex<HashMap<String, Account>>,
}

impl Tenants {
    /// Nobody has used anything yet.
    pub fn new(table: LimitTable) -> Self {
        Self { table, accounts: Mutex::default() }
    }

    /// What the media of a tenant's requests may be.
    pub(crate) fn media(&self, tenant: &str) -> MediaAllowance {
        self.table.limits(tenant).media
    }

    /// Begins a request.
    ///
    /// # Errors
    /// `Overloaded` naming the limit, and when to come back.
    pub(crate) fn enter(&self, tenant: &str, now: Instant) -> Result<(), GatewayError> {
        let limits = self.table.limits(tenant);
        if !limits.is_counted() {
            return Ok(());
        }
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let account = accounts.entry(tenant.to_owned()).or_insert_with(|| Account {
            running: 0,
            balance: limits.tokens_per_minute.unwrap_or(0) as f64,
            as_of: now,
        });
        account.refill(limits, now);
        let mut refused = None;
        if let Some(rate) = limits.tokens_per_minute
            && account.balance <= 0.0
        {
            let wait_s = (1.0 - account.balance) * 60.0 / rate as f64;
            refused = Some((format!("the limit of {rate} tokens a minute is used up"), wait_s));
        }
        if let Some(limit) = limits.max_concurrent_requests
            && account.running >= limit
        {
            refused = Some((format!("all {limit} requests that may run at once are running"), 1.0));
        }
        match refused {
            None => {
                account.running += 1;
                Ok(())
            }
            Some((message, wait_s)) => {
                let mut error = GatewayError::new(ErrorKind::Overloaded, message);
                error.code = "rate_limit_exceeded";
                Err(error.retry_after(wait_s.ceil().clamp(1.0, 3600.0) as u32))
            }
        }
    }

    /// Notes tokens that a request has used.
    pub(crate) fn charge(&self, tenant: &str, tokens: u64, now: Instant) {
        let limits = self.table.limits(tenant);
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = accounts.get_mut(tenant) {
            account.refill(limits, now);
            account.balance -= tokens as f64;
        }
    }

    /// Ends a request.
    pub(crate) fn leave(&self, tenant: &str, now: Instant) {
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = accounts.get_mut(tenant) {
            account.running = account.running.saturating_sub(1);
        }
        // whoever owes nothing and runs nothing is as new: names alone take no memory
        if accounts.len() > MAX_IDLE_ACCOUNTS {
            accounts.retain(|name, account| {
                let limits = self.table.limits(name);
                account.refill(limits, now);
                account.running > 0
                    || account.balance < limits.tokens_per_minute.unwrap_or(0) as f64
            });
        }
    }

    /// What a tenant has left; `None` if nothing limits it.
    pub fn allowance(&self, tenant: &str, now: Instant) -> Option<Allowance> {
        let limits = self.table.limits(tenant);
        if !limits.is_counted() {
            return None;
        }
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = limits.tokens_per_minute.unwrap_or(0) as f64;
        let (running, balance) = match accounts.get_mut(tenant) {
            None => (0, rate),
            Some(account) => {
                account.refill(limits, now);
                (account.running, account.balance)
            }
        };
        let full_after_s = if rate > 0.0 { (rate - balance) * 60.0 / rate } else { 0.0 };
        Some(Allowance {
            limits,
            remaining_requests: limits.max_concurrent_requests.unwrap_or(0).saturating_sub(running),
            remaining_tokens: balance.max(0.0) as u64,
            full_after_s,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn tenants(text: &str) -> (Tenants, Instant) {
        (Tenants::new(toml::from_str(text).unwrap()), Instant::now())
    }

    #[test]
    fn a_tenant_in_debt_waits_until_it_is_paid_off_and_others_do_not() {
        let (tenants, now) = tenants("[default]\ntokens_per_minute = 600\n");
        tenants.enter("a", now).unwrap();
        tenants.charge("a", 1000, now);
        tenants.leave("a", now);

        let refusal = tenants.enter("a", now).unwrap_err();
        assert_eq!((refusal.kind, refusal.retry_after_s), (ErrorKind::Overloaded, Some(41)));
        assert!(refusal.message.contains("600 tokens"), "{refusal}");
        tenants.enter("b", now).unwrap();
        tenants.enter("a", now + Duration::from_secs(41)).unwrap();
    }

    #[test]
    fn a_pause_earns_no_more_than_a_minute() {
        let (tenants, now) = tenants("[tenants.a]\ntokens_per_minute = 60\n");
        tenants.enter("a", now).unwrap();
        let later = now + Duration::from_secs(3600);
        tenants.charge("a", 90, later);
        let left = tenants.allowance("a", later).unwrap();
        assert_eq!((left.remaining_tokens, left.full_after_s), (0, 90.0));
        assert_eq!(tenants.allowance("b", later), None);
    }

    #[test]
    fn requests_at_once_are_counted_by_tenant() {
        let (tenants, now) = tenants(
            "[default]\nmax_concurrent_requests = 1\n[tenants.big]\nmax_concurrent_requests = 2\n",
        );
        tenants.enter("big", now).unwrap();
        tenants.enter("big", now).unwrap();
        assert!(tenants.enter("big", now).unwrap_err().message.contains("all 2 requests"));
        tenants.enter("small", now).unwrap();
        assert_eq!(tenants.enter("small", now).unwrap_err().code, "rate_limit_exceeded");
        tenants.leave("small", now);
        tenants.enter("small", now).unwrap();
    }

    #[test]
    fn a_hundred_thousand_names_leave_no_memory_behind() {
        let (tenants, now) = tenants("[default]\nmax_concurrent_requests = 1\n");
        for number in 0..100_000 {
            let name = number.to_string();
            tenants.enter(&name, now).unwrap();
            tenants.leave(&name, now);
        }
        assert!(tenants.accounts.lock().unwrap().len() <= MAX_IDLE_ACCOUNTS);
    }
}
