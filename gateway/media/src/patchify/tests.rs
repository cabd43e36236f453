//! Patch order, the missing temporal copy of stills, the repeated last frame of odd clips.

use super::{TemporalPatch, patchify_clip, patchify_resized, patchify_still};
use crate::resize::{Resizer, resize};
use crate::types::{GridThw, ImageSize, PatchLayout, RgbFrame};

const M3: PatchLayout = PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 };

/// A frame in which every byte tells its place and its frame number.
fn frame(width: u32, height: u32, number: usize) -> RgbFrame {
    let pixels = (0..(width * height * 3) as usize).map(|at| value(number, at)).collect();
    RgbFrame { size: ImageSize { width, height }, pixels }
}

fn value(number: usize, at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 7) as u8 ^ (number * 57) as u8
}

/// The order written out as the model defines it: patch rows `(t, by, bx, iy, ix)`, inside a row
/// `(channel, tau, y, x)`.
fn by_definition(frames: &[RgbFrame], layout: PatchLayout, copies: u32) -> Vec<u8> {
    let (p, m) = (layout.patch_size, layout.merge_size);
    let ImageSize { width, height } = frames[0].size;
    let (rows, columns) = (height / p, width / p);
    let mut out = Vec::new();
    for t in 0..(frames.len() as u32).div_ceil(copies) {
        for (by, bx) in pairs(rows / m, columns / m) {
            for (iy, ix) in pairs(m, m) {
                for (c, tau) in pairs(3, copies) {
                    let frame = &frames[((t * copies + tau) as usize).min(frames.len() - 1)];
                    for (y, x) in pairs(p, p) {
                        let (py, px) = ((by * m + iy) * p + y, (bx * m + ix) * p + x);
                        out.push(frame.pixels[((py * width + px) * 3 + c) as usize]);
                    }
                }
            }
        }
    }
    out
}

fn pairs(outer: u32, inner: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..outer).flat_map(move |a| (0..inner).map(move |b| (a, b)))
}

#[test]
fn a_still_comes_in_merge_block_order_without_its_second_copy() {
    for (width, height) in [(28, 28), (84, 56), (56, 140)] {
        let picture = frame(width, height, 0);
        let patches = patchify_still(&picture, M3);
        assert_eq!(patches.grid, GridThw { t: 1, h: height / 14, w: width / 14 });
        assert_eq!(patches.frames_per_patch, 1);
        assert_eq!(patches.bytes, by_definition(&[picture], M3, 1), "{width}x{height}");
    }
}

#[test]
fn a_clip_pairs_its_frames_and_repeats_an_odd_last_one() {
    for count in 1..6 {
        let frames: Vec<RgbFrame> = (0..count).map(|number| frame(84, 56, number)).collect();
        let patches = patchify_clip(&frames, M3);
        assert_eq!(patches.grid, GridThw { t: count.div_ceil(2) as u32, h: 4, w: 6 });
        assert_eq!(patches.frames_per_patch, 2);
        assert_eq!(patches.bytes, by_definition(&frames, M3, 2), "{count} frames");
        assert_eq!(patches.bytes.len() as u64, patches.grid.patches() * 3 * 2 * 14 * 14);
    }
}

#[test]
fn other_layouts_work_too() {
    let layout = PatchLayout { patch_size: 4, temporal_patch_size: 3, merge_size: 3 };
    let frames: Vec<RgbFrame> = (0..5).map(|number| frame(24, 36, number)).collect();
    assert_eq!(patchify_clip(&frames, layout).bytes, by_definition(&frames, layout, 3));
    assert_eq!(patchify_still(&frames[0], layout).bytes, by_definition(&frames[..1], layout, 1));
}

#[test]
#[should_panic(expected = "not a multiple of 28")]
fn a_frame_of_another_size_is_a_fault_of_ours() {
    patchify_still(&frame(30, 28, 0), M3);
}

#[test]
fn resizing_on_the_way_gives_the_same_rows_on_every_path() {
    for (from, to) in
        [((90, 61), (56, 84)), ((56, 61), (56, 84)), ((90, 84), (56, 84)), ((56, 84), (56, 84))]
    {
        let picture = frame(from.0, from.1, 3);
        let target = ImageSize { width: to.0, height: to.1 };
        let resizer = Resizer::new(picture.size, target);
        let apart = patchify_still(&resize(&picture, target), M3);
        assert_eq!(patchify_resized(&picture, &resizer, M3), apart, "{from:?} to {to:?}");

        let mut slice = TemporalPatch::new(target, M3, 2);
        slice.add(&picture, &resizer);
        assert!(!slice.is_full());
        let alone = patchify_clip(&[resize(&picture, target)], M3).bytes;
        assert_eq!(slice.finish(), alone, "{from:?} to {to:?}");
    }
}
