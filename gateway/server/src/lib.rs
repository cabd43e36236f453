//! The doing of the gateway: sockets, processes, workers. Thinking is `gateway-core`'s.
//!
//! Read `pipeline` first: it tells a request's story. One way only:
//! `http` → `pipeline` → `reply` → `sample` → { `media`, `workers`, `reader` } → core;
//! `discovery` keeps the list of `workers`; `admission`, `tenants`, `keys`, `tls`, `blocking`, `config`, `error` and `telemetry` are leaves.

pub mod admission;
pub mod app;
mod blocking;
pub mod config;
pub mod discovery;
pub mod error;
pub mod http;
pub mod keys;
pub mod media;
mod pipeline;
pub mod prepare;
mod priority;
mod rare;
mod reader;
mod reply;
mod run;
mod sample;
mod stages;
pub mod telemetry;
pub mod tenants;
pub mod tls;
pub mod workers;

pub use app::{App, StartError};
pub use config::{ConfigError, GatewayConfig};
pub use run::{EXIT_CONFIG, EXIT_START, run, run_with_arguments};
