//! What ffprobe may print, and what is made of it.

use super::*;

const STREAM: &str =
    "stream|codec_name=h264|width=128|height=96|avg_frame_rate=10/1|nb_frames=N/A\n";

fn listing(lines: &str) -> Listing {
    Listing::parse(format!("{lines}{STREAM}").as_bytes()).unwrap()
}

#[test]
fn packets_in_decoding_order_become_times_in_showing_order_from_zero() {
    let probe = listing(
        "packet|pts_time=11.4|flags=K_|side_data|\n\npacket|pts_time=11.6|flags=__\n\
         packet|pts_time=11.5|flags=__\n",
    );
    assert!(probe.is_trustworthy());
    let probe = probe.into_probe().unwrap();
    assert_eq!(probe.info.num_frames, 3);
    assert_eq!(probe.info.fps, 10.0);
    assert!(probe.frame_times_s.iter().zip([0.0, 0.1, 0.2]).all(|(a, b)| (a - b).abs() < 1e-9));
    assert!((probe.info.duration_s - 0.3).abs() < 1e-9);
}

#[test]
fn discarded_packets_are_not_frames() {
    let probe = listing(
        "packet|pts_time=-0.1|flags=KD\npacket|pts_time=0.0|flags=__\n\
         packet|pts_time=0.1|flags=__\n",
    );
    assert!(probe.is_trustworthy());
    assert_eq!(probe.into_probe().unwrap().info.num_frames, 2);
}

#[test]
fn what_packets_cannot_tell_is_asked_of_the_decoder() {
    for lines in [
        "packet|pts_time=0.0|flags=__\n",
        "packet|pts_time=N/A|flags=K_\n",
        "packet|pts_time=0.0|flags=K_\npacket|pts_time=0.0|flags=__\n",
        "packet|pts_time=0.0|flags=K_C\n",
    ] {
        assert!(!listing(lines).is_trustworthy(), "{lines}");
    }
    let short = STREAM.replace("N/A", "30");
    let lines = format!("packet|pts_time=0.0|flags=K_\n{short}");
    assert!(!Listing::parse(lines.as_bytes()).unwrap().is_trustworthy());
    let vp8 = STREAM.replace("h264", "vp8");
    let lines = format!("packet|pts_time=0.0|flags=K_\n{vp8}");
    assert!(!Listing::parse(lines.as_bytes()).unwrap().is_trustworthy());
}

#[test]
fn decoded_frames_decide_when_asked() {
    let decoded = listing(
        "frame|best_effort_timestamp_time=0.0\nframe|best_effort_timestamp_time=N/A\n\
         frame|best_effort_timestamp_time=0.2\n",
    );
    let probe = listing("packet|pts_time=0.0|flags=__\n").with_frames_of(&decoded);
    let probe = probe.into_probe().unwrap();
    assert_eq!(probe.info.num_frames, 3);
    assert!((probe.frame_times_s[1] - 0.1).abs() < 1e-9);
    let nothing = listing("packet|pts_time=0.0|flags=__\n").with_frames_of(&listing(""));
    assert!(nothing.into_probe().is_err());
}

#[test]
fn a_rate_seen_through_rounded_stamps_is_the_containers() {
    let times: Vec<f64> =
        (0..90).map(|n| (f64::from(n) / 30.0 * 1000.0).round() / 1000.0).collect();
    assert_eq!(frame_rate(&times, Some(30.0)), 30.0);
    assert!((frame_rate(&[0.0, 0.1, 1.0], Some(10.0)) - 2.0).abs() < 1e-9);
    assert_eq!(frame_rate(&[0.0], Some(25.0)), 25.0);
    assert_eq!(frame_rate(&[0.0], None), 1.0);
}

#[test]
fn each_right_angle_has_its_filter_and_swaps_the_sides() {
    let matrix = |a: i32, b: i32, c: i32, d: i32| {
        format!("\\n00000000: {a} {b} 0\\n00000001: {c} {d} 0\\n00000002: 0 0 1073741824\\n")
    };
    let one = 65536;
    assert_eq!(turn(&matrix(0, one, -one, 0)), "transpose=clock");
    assert_eq!(turn(&matrix(-one, 0, 0, -one)), "hflip,vflip");
    assert_eq!(turn(&matrix(one, 0, 0, one)), "");
    assert_eq!(turn(&matrix(46341, 46341, -46341, 46341)), "");
    let size = ImageSize { width: 128, height: 96 };
    assert_eq!(upright(size, "transpose=clock"), ImageSize { width: 96, height: 128 });
    assert_eq!(upright(size, "hflip,vflip"), size);
}

#[test]
fn a_file_without_pictures_is_refused() {
    assert!(Listing::parse(b"format|format_name=mov\n").is_err());
}
