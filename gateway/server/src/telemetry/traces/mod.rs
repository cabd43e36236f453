//! Where the time of a request goes, as a trace that other systems can read.
//!
//! Every request has a W3C trace context; spans are kept and sent only if there is a collector.
//! Source: W3C Trace Context level 1; OTLP 1.x over HTTP in JSON.

mod export;
mod spans;
#[cfg(test)]
mod tests;

pub use export::Tracer;
pub use spans::{RequestTrace, WorkerCall};

/// The trace a request belongs to, and the span that this gateway is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// Of the whole trace.
    pub trace_id: [u8; 16],
    /// Of this gateway's part.
    pub span_id: [u8; 8],
    /// Of the caller's part.
    pub parent: Option<[u8; 8]>,
    /// Whether whoever began the trace wants it kept.
    pub is_sampled: bool,
}

impl TraceContext {
    /// Goes on with the caller's `traceparent`, or begins a trace if there is none that is valid.
    pub fn of(traceparent: Option<&str>) -> Self {
        let span_id = rand::random::<u64>().max(1).to_be_bytes();
        match traceparent.and_then(parse) {
            Some((trace_id, parent, is_sampled)) => {
                Self { trace_id, span_id, parent: Some(parent), is_sampled }
            }
            None => {
                let trace_id = rand::random::<u128>().max(1).to_be_bytes();
                Self { trace_id, span_id, parent: None, is_sampled: true }
            }
        }
    }

    /// The `traceparent` of what this gateway asks of others.
    pub fn traceparent(&self) -> String {
        let flags = u8::from(self.is_sampled);
        ["00", &hex(&self.trace_id), &hex(&self.span_id), &hex(&[flags])].join("-")
    }

    /// The trace's id as people and tools write it.
    pub fn trace_id_hex(&self) -> String {
        hex(&self.trace_id)
    }
}

fn parse(text: &str) -> Option<([u8; 16], [u8; 8], bool)> {
    let mut parts = text.split('-');
    let (version, trace, parent, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    // later versions may append fields; version 255 is forbidden
    if (version == "00" && parts.next().is_some()) || version == "ff" {
        return None;
    }
    let [_version] = bytes::<1>(version)?;
    let [flags] = bytes::<1>(flags)?;
    let (trace, parent) = (bytes::<16>(trace)?, bytes::<8>(parent)?);
    (trace != [0; 16] && parent != [0; 8]).then_some((trace, parent, flags & 1 == 1))
}

fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() != 2 * N || !text.bytes().all(is_hex) {
        return None;
    }
    let mut found = [0; N];
    for (place, byte) in found.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * place..2 * place + 2)?, 16).ok()?;
    }
    Some(found)
}

/// Digits by table: every request has some, and formatting each byte costs ten times as much.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}
