//! The resampling kernels in plain Rust: the meaning that the faster ones must equal in every byte.

use super::weights::AxisWeights;

/// Bytes handled together by the vertical kernel, so that the compiler can use vector registers.
const LANES: usize = 16;

/// One row of RGB pixels made narrower or wider.
///
/// `source` is the row and may go on past its end; `target` is the whole resulting row.
pub(super) fn horizontal_row(source: &[u8], target: &mut [u8], axis: &AxisWeights) {
    for index in 0..target.len() / 3 {
        horizontal_pixel(source, target, axis, index);
    }
}

/// One pixel of [`horizontal_row`].
pub(super) fn horizontal_pixel(source: &[u8], target: &mut [u8], axis: &AxisWeights, index: usize) {
    let weights = axis.row(index);
    let window = &source[axis.starts[index] as usize * 3..][..weights.len() * 3];
    let mut sums = [rounding(axis.precision); 3];
    for (pixel, &weight) in window.chunks_exact(3).zip(weights) {
        for (sum, &value) in sums.iter_mut().zip(pixel) {
            *sum += i32::from(value) * i32::from(weight);
        }
    }
    for (byte, sum) in target[index * 3..][..3].iter_mut().zip(sums) {
        *byte = to_byte(sum, axis.precision);
    }
}

/// One row made of `rows` weighted by `weights`, one each; all rows as long as `target`.
pub(super) fn vertical_row(rows: &[&[u8]], target: &mut [u8], weights: &[i16], precision: u32) {
    for (block, out) in target.chunks_mut(LANES).enumerate() {
        let mut sums = [rounding(precision); LANES];
        for (row, &weight) in rows.iter().zip(weights) {
            let bytes = &row[block * LANES..][..out.len()];
            for (sum, &value) in sums.iter_mut().zip(bytes) {
                *sum += i32::from(value) * i32::from(weight);
            }
        }
        for (byte, sum) in out.iter_mut().zip(sums) {
            *byte = to_byte(sum, precision);
        }
    }
}

/// A half in fixed point.
pub(super) fn rounding(precision: u32) -> i32 {
    1 << (precision - 1)
}

fn to_byte(sum: i32, precision: u32) -> u8 {
    (sum >> precision).clamp(0, 255) as u8
}
