//! The sampling rule against its transcription in Python, and by its own claims.

use super::choose_frames;
use proptest::prelude::*;

const VECTORS: &str = include_str!("../../../../tests/data/sampling/vectors.txt");

#[test]
fn frames_equal_those_of_the_python_transcription() {
    let mut cases = 0;
    for line in VECTORS.lines() {
        let (case, chosen) = line.split_once(": ").expect("a case and its frames");
        let fields: Vec<&str> = case.split(' ').collect();
        let rate = |field: &str| f64::from_bits(u64::from_str_radix(field, 16).unwrap());
        let frames = choose_frames(
            fields[0].parse().unwrap(),
            rate(fields[1]),
            rate(fields[2]),
            fields[3].parse().unwrap(),
        );
        let expected: Vec<u64> = chosen.split(' ').map(|frame| frame.parse().unwrap()).collect();
        assert_eq!(frames, expected, "{case}");
        cases += 1;
    }
    assert!(cases > 300);
}

#[test]
fn one_frame_a_second_ends_with_the_last_frame() {
    assert_eq!(choose_frames(100, 24.0, 1.0, 768), [0, 24, 48, 72, 96, 99]);
    assert_eq!(choose_frames(97, 24.0, 1.0, 768), [0, 24, 48, 72, 96]);
    assert_eq!(choose_frames(60, 60.0, 1.0, 768), [0, 59]);
}

#[test]
fn a_clip_without_frames_or_rate_is_no_endless_loop() {
    assert_eq!(choose_frames(0, 30.0, 1.0, 768), Vec::<u64>::new());
    for (rate, fps) in [(0.0, 1.0), (-1.0, 1.0), (f64::NAN, 1.0), (f64::INFINITY, 1.0), (30.0, 0.0)]
    {
        assert_eq!(choose_frames(500, rate, fps, 768), [0], "{rate} {fps}");
    }
    assert_eq!(choose_frames(500, 30.0, 1.0, 1), [0]);
    assert_eq!(choose_frames(u64::MAX, 1e300, 5.0, 768), [0]);
}

proptest! {
    #[test]
    fn frames_ascend_stay_inside_and_keep_both_ends(
        total in 1_u64..20_000, rate in 0.01_f64..240.0, fps in 0.2_f64..5.0, most in 2_usize..800,
    ) {
        let frames = choose_frames(total, rate, fps, most);
        prop_assert!(!frames.is_empty() && frames.len() <= most);
        prop_assert_eq!(frames[0], 0);
        prop_assert!(frames.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", frames);
        // the end is missing only where it falls within the tolerance of its neighbour, which
        // takes a rate of more than 10,000 frames a second
        prop_assert_eq!(*frames.last().unwrap(), total - 1);
    }
}
