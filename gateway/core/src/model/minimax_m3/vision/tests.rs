//! Sizes, frames, times and placeholders against the reference's answers.

use super::VisionGeometry;
use crate::error::RequestErrorKind;
use crate::json::Json;
use crate::model::{MediaKind, PlaceholderPiece, SizeControls};
use gateway_media::{ClipInfo, GridThw, ImageSize, PatchLayout};

const SIZES: &str = include_str!("../../../../../../tests/data/vision/sizes.txt");
const TIMES: &str = include_str!("../../../../../../tests/data/vision/times.txt");
const IMAGE_FILE: &str =
    include_str!("../../../../../../tests/data/tiny_m3/preprocessor_config.json");
const VIDEO_FILE: &str =
    include_str!("../../../../../../tests/data/tiny_m3/video_preprocessor_config.json");

fn json(text: &str) -> Json {
    Json::parse(text.as_bytes()).unwrap()
}

fn geometry() -> VisionGeometry {
    VisionGeometry::from_files(Some(&json(IMAGE_FILE)), Some(&json(VIDEO_FILE))).unwrap()
}

fn size(height: u32, width: u32) -> ImageSize {
    ImageSize { width, height }
}

fn clip(num_frames: u64, fps: f64, (height, width): (u32, u32)) -> ClipInfo {
    ClipInfo { size: size(height, width), num_frames, fps, duration_s: num_frames as f64 / fps }
}

fn silent() -> SizeControls {
    SizeControls::default()
}

fn capped(max_long_side_pixel: i64) -> SizeControls {
    SizeControls { max_long_side_pixel: Some(max_long_side_pixel), ..silent() }
}

fn detailed(detail: &str) -> SizeControls {
    SizeControls { detail: Some(detail.into()), ..silent() }
}

#[test]
fn stills_take_the_sizes_and_tokens_of_the_released_rule() {
    // height, width, resized height and width, tokens
    let table = [
        (14, 14, 56, 56, 4),
        (28, 28, 56, 56, 4),
        (30, 61, 56, 84, 6),
        (100, 37, 112, 28, 4),
        (42, 70, 56, 56, 4),
        (225, 150, 224, 140, 40),
        (97, 410, 84, 420, 45),
        (10, 1000, 28, 560, 20),
        (500, 700, 504, 700, 450),
        (672, 672, 672, 672, 576),
        (700, 700, 672, 672, 576),
        (1080, 1920, 504, 896, 576),
        (1920, 1080, 896, 504, 576),
        (4000, 3000, 756, 560, 540),
        (40, 400, 28, 392, 14),
        (8000, 40, 8008, 28, 286),
        (98, 98, 112, 112, 16),
    ];
    for (height, width, target_height, target_width, tokens) in table {
        let plan = geometry().plan_image(size(height, width), &silent()).unwrap();
        assert_eq!(plan.target, size(target_height, target_width), "{height}x{width}");
        assert_eq!(plan.grid, GridThw { t: 1, h: target_height / 14, w: target_width / 14 });
        assert_eq!((plan.kind, plan.num_tokens), (MediaKind::Image, tokens), "{height}x{width}");
        assert!(plan.frames.is_empty() && plan.patch_times_s.is_empty());
    }
}

#[test]
fn any_size_is_resized_as_the_reference_resizes_it() {
    let geometry = geometry();
    for line in SIZES.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let side = |index: usize| fields[index].parse::<u32>().unwrap();
        let source = size(side(0), side(1));
        let plan = match fields[2] {
            "image" => geometry.plan_image(source, &silent()),
            _ => geometry.plan_clip(&clip(1, 30.0, (side(0), side(1))), &silent()),
        };
        match plan {
            Ok(plan) => assert_eq!(plan.target, size(side(3), side(4)), "{line}"),
            Err(error) => {
                assert_eq!(fields[3], "refused", "{line}: {error}");
                assert_eq!(error.kind, RequestErrorKind::MediaRejected);
                assert!(error.message.contains("the limit is 200"), "{error}");
            }
        }
    }
}

#[test]
fn a_long_side_limit_takes_the_place_of_the_area_limits() {
    for (source, limit, target) in [
        (size(2048, 2048), 252, size(252, 252)),
        (size(2048, 2048), 504, size(504, 504)),
        (size(2048, 2048), 1008, size(1008, 1008)),
        (size(3000, 5000), 252, size(140, 252)),
        (size(3000, 5000), 504, size(308, 504)),
        (size(3000, 5000), 1008, size(616, 1008)),
        (size(500, 400), 1008, size(504, 392)),
        (size(100, 4000), 1008, size(28, 1008)),
        (size(3584, 3584), 3584, size(3584, 3584)),
        // the short side is brought up to 112, whatever that makes of the long one
        (size(40, 400), 504, size(112, 1120)),
        (size(1, 1), 504, size(112, 112)),
        (size(111, 20), 504, size(616, 112)),
    ] {
        let plan = geometry().plan_image(source, &capped(limit)).unwrap();
        assert_eq!(plan.target, target, "{source:?} within {limit}");
        assert_eq!(plan.num_tokens, target.pixels() / 784);
    }
}

#[test]
fn detail_means_a_tier_and_the_number_wins_over_it() {
    let plan = |controls: &SizeControls| geometry().plan_image(size(3000, 4000), controls).unwrap();
    for same in ["default", "auto"] {
        assert_eq!(plan(&detailed(same)), plan(&silent()));
    }
    assert_eq!(plan(&detailed("low")), plan(&capped(504)));
    assert_eq!(plan(&detailed("high")), plan(&capped(2016)));
    let both = SizeControls { max_long_side_pixel: Some(252), ..detailed("high") };
    assert_eq!(plan(&both), plan(&capped(252)));
    let error = geometry().plan_image(size(9, 9), &detailed("ultra")).unwrap_err();
    assert_eq!(error.kind, RequestErrorKind::InvalidRequest);
    assert!(error.message.contains("\"ultra\""), "{error}");
}

#[test]
fn long_side_limits_off_the_grid_are_refused_with_the_range() {
    for limit in [-1, i64::MIN, 0, 28, 140, 251, 1009, 3585, 3612, i64::MAX] {
        let error = geometry().plan_image(size(90, 90), &capped(limit)).unwrap_err();
        assert_eq!(error.kind, RequestErrorKind::InvalidRequest);
        let wanted = format!("a multiple of 28 from 168 to 3584, got {limit}");
        assert!(error.message.contains(&wanted), "{error}");
    }
}

#[test]
fn a_clip_pairs_frames_and_dates_each_pair_by_its_first() {
    // frames of the clip at 1 a second, temporal patches
    for (frames, slices) in [(1, 1), (2, 1), (7, 4), (8, 4), (9, 5), (17, 9)] {
        let plan = geometry().plan_clip(&clip(frames, 1.0, (56, 56)), &silent()).unwrap();
        assert_eq!(plan.frames, (0..frames).collect::<Vec<_>>());
        assert_eq!(plan.grid, GridThw { t: slices, h: 4, w: 4 });
        assert_eq!(plan.num_tokens, u64::from(slices) * 4);
        let times: Vec<f64> = (0..slices).map(|slice| f64::from(slice) * 2.0).collect();
        assert_eq!(plan.patch_times_s, times);
    }
    let plan = geometry().plan_clip(&clip(100, 24.0, (1080, 1920)), &silent()).unwrap();
    assert_eq!(plan.frames, [0, 24, 48, 72, 96, 99]);
    assert_eq!(plan.target, size(560, 1008));
    assert_eq!(plan.patch_times_s, [0.0, 2.0, 4.0]);
}

#[test]
fn the_rate_is_the_requests_within_its_range_else_the_files() {
    let at = |fps: f64| SizeControls { fps: Some(fps), ..silent() };
    let frames = |controls: &SizeControls| {
        geometry().plan_clip(&clip(100, 10.0, (56, 56)), controls).unwrap().frames.len()
    };
    assert_eq!((frames(&at(0.2)), frames(&silent()), frames(&at(2.0))), (3, 11, 21));
    for fps in [0.0, 0.19, 5.1, -1.0, f64::NAN] {
        let error = geometry().plan_clip(&clip(9, 10.0, (56, 56)), &at(fps)).unwrap_err();
        assert_eq!(error.kind, RequestErrorKind::InvalidRequest);
        assert!(error.message.contains("from 0.2 to 5"), "{error}");
    }
}

#[test]
fn clips_past_the_limits_are_refused_and_long_ones_are_thinned() {
    let long = geometry().plan_clip(&clip(54_000, 30.0, (1080, 1920)), &silent()).unwrap();
    assert_eq!((long.frames.len(), long.frames.last()), (768, Some(&53_999)));
    let error = geometry().plan_clip(&clip(54_000, 30.0, (1080, 1920)), &capped(1008)).unwrap_err();
    assert!(error.message.contains("768 frames of 1008x560"), "{error}");
    assert!(geometry().plan_clip(&clip(15_000, 30.0, (1080, 1920)), &capped(1008)).is_ok());
    for bad in [clip(0, 30.0, (9, 9)), clip(5, 0.0, (9, 9)), clip(u64::MAX, 30.0, (9, 9))] {
        let error = geometry().plan_clip(&bad, &silent()).unwrap_err();
        assert_eq!(error.kind, RequestErrorKind::MediaRejected);
    }
}

#[test]
fn a_still_is_one_block_of_placeholders() {
    let plan = geometry().plan_image(size(225, 150), &silent()).unwrap();
    let pieces = [
        PlaceholderPiece::Marker("]<]start of image[>["),
        PlaceholderPiece::Pads { count: 40 },
        PlaceholderPiece::Marker("]<]end of image[>["),
    ];
    assert_eq!(geometry().placeholder(&plan), pieces);
}

#[test]
fn a_clip_is_one_dated_block_a_temporal_patch() {
    let plan = geometry().plan_clip(&clip(11, 1.0, (50, 90)), &silent()).unwrap();
    assert_eq!(plan.target, size(56, 84));
    let pieces: Vec<PlaceholderPiece> = (0..6)
        .flat_map(|slice| {
            [
                PlaceholderPiece::Text(format!("]<]{}.0 seconds[>[", 2 * slice)),
                PlaceholderPiece::Marker("]<]start of image[>["),
                PlaceholderPiece::Pads { count: 6 },
                PlaceholderPiece::Marker("]<]end of image[>["),
            ]
        })
        .collect();
    assert_eq!(geometry().placeholder(&plan), pieces);
}

#[test]
fn times_are_printed_as_python_prints_them() {
    let mut plan = geometry().plan_clip(&clip(1, 1.0, (56, 56)), &silent()).unwrap();
    for line in TIMES.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let frame: u64 = fields[0].parse().unwrap();
        let rate = f64::from_bits(u64::from_str_radix(fields[1], 16).unwrap());
        plan.patch_times_s = vec![frame as f64 / rate];
        let text = PlaceholderPiece::Text(format!("]<]{} seconds[>[", fields[2]));
        assert_eq!(geometry().placeholder(&plan)[0], text, "{line}");
    }
}

#[test]
fn the_files_give_layout_and_normalisation_and_absent_ones_the_defaults() {
    let read = geometry();
    let layout = PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 };
    assert_eq!(read.patch_layout(), layout);
    assert_eq!(read.pixel_norm().mean, [0.481_454_66, 0.457_827_5, 0.408_210_73]);
    assert_eq!(read.pixel_norm().std, [0.268_629_54, 0.261_302_6, 0.275_777_1]);
    assert_eq!(VisionGeometry::from_files(None, None).unwrap(), read);
    // the released form, and the form that older processors save
    for text in [r#"{"size": [672, 672]}"#, r#"{"size": {"height": 672, "width": 672}}"#] {
        assert_eq!(VisionGeometry::from_files(Some(&json(text)), None).unwrap(), read);
    }
}

#[test]
fn files_may_set_other_limits() {
    let image = json(r#"{"size": {"shortest_edge": 12544, "longest_edge": 100352}}"#);
    let video = json(r#"{"max_pixels": 12544, "fps": 2, "max_frames": 5}"#);
    let geometry = VisionGeometry::from_files(Some(&image), Some(&video)).unwrap();
    let still = |h, w| geometry.plan_image(size(h, w), &silent()).unwrap().target;
    assert_eq!((still(20, 20), still(2000, 2000)), (size(112, 112), size(308, 308)));
    let plan = geometry.plan_clip(&clip(100, 10.0, (500, 500)), &silent()).unwrap();
    assert_eq!((plan.target, plan.frames.len()), (size(112, 112), 5));
}

#[test]
fn files_that_ask_for_something_else_are_refused_by_name() {
    for (image, video, message) in [
        (r#"{"patch_size": 0}"#, "{}", "preprocessor_config.json: patch_size must be from 1"),
        (r#"{"patch_size": "a"}"#, "{}", "patch_size must be a whole number, got \"a\""),
        (r#"{"image_std": [1, 0, 1]}"#, "{}", "image_std must be three numbers above 0"),
        (
            r#"{"image_mean": [0.5, 0.5, 0.5]}"#,
            "{}",
            "video_preprocessor_config.json: normalisation",
        ),
        ("{}", r#"{"merge_size": 4}"#, "patch layout differs"),
        (r#"{"do_rescale": false}"#, "{}", "do_rescale must be true"),
        (r#"{"resample": 2}"#, "{}", "resample must be from 3 to 3, got 2"),
        (r#"{"rescale_factor": 1}"#, "{}", "rescale_factor must be 1/255, got 1"),
        (r#"{"size": {"longest_edge": 9}}"#, "{}", "size must give shortest_edge and longest_edge"),
        (r#"{"min_pixels": 9000, "max_pixels": 8000}"#, "{}", "pixels from 9000 to 8000"),
        ("{}", r#"{"max_frames": 1}"#, "max_frames must be from 2"),
        ("{}", r#"{"fps": 0}"#, "fps must be a number above 0, got 0"),
    ] {
        let error = VisionGeometry::from_files(Some(&json(image)), Some(&json(video))).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
}
