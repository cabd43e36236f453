//! Trace contexts: what is taken over, and what is not.

use super::*;

const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[test]
fn a_callers_trace_goes_on_under_a_span_of_our_own() {
    let context = TraceContext::of(Some(GIVEN));
    assert_eq!(context.trace_id_hex(), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(context.parent.map(|parent| hex(&parent)).as_deref(), Some("b7ad6b7169203331"));
    assert!(context.is_sampled);
    let ours = context.traceparent();
    assert!(ours.starts_with("00-0af7651916cd43dd8448eb211c80319c-") && ours.ends_with("-01"));
    assert_ne!(ours, GIVEN);
    assert!(!TraceContext::of(Some(&GIVEN.replace("-01", "-00"))).is_sampled);
    // what a later version appends is not for us
    assert!(TraceContext::of(Some(&format!("01{}-more", &GIVEN[2..]))).parent.is_some());
}

#[test]
fn what_is_no_traceparent_begins_a_trace() {
    for text in [
        "",
        "00",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319ö-b7ad6b7169203331-01",
    ] {
        assert_eq!(TraceContext::of(Some(text)).parent, None, "{text}");
    }
    let (one, other) = (TraceContext::of(None), TraceContext::of(None));
    assert_ne!(one.trace_id, other.trace_id);
}
