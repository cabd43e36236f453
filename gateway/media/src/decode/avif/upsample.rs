//! Colour differences for each pixel of a row, where one sample stands for several pixels.
//!
//! Source: libyuv 1924 (`ScaleRowUp2_Linear_C`, `ScaleRowUp2_Bilinear_C` and what calls them) for
//! integers, libavif 1.4 (`avifImageYUVAnyToRGBAnySlow`) for floats; they differ at the edges.

/// The row of samples beside that of pixel row `row`, which has a quarter of the say. The integers
/// treat the last row of a picture of even height as the first, the floats too.
pub(super) fn row_beside(row: usize, num_rows: usize) -> Option<usize> {
    let is_edge = row == 0 || (row == num_rows - 1 && row % 2 == 1);
    (!is_edge).then(|| if row % 2 == 1 { row / 2 + 1 } else { row / 2 - 1 })
}

/// The sample beside that of a pixel in the middle of a row.
fn beside(column: usize) -> usize {
    if column % 2 == 1 { column / 2 + 1 } else { column / 2 - 1 }
}

/// Two samples a pixel apart, in integers. The last pixel of a row is as the first, also where the
/// width is odd.
pub(super) fn integers(near: &[u16], far: Option<&[u16]>, row: &mut [u16]) {
    let last = row.len() - 1;
    for (column, value) in row.iter_mut().enumerate() {
        let own = column / 2;
        let other = if column == 0 || column == last { None } else { Some(beside(column)) };
        let at = |samples: &[u16], place: usize| u32::from(samples[place]);
        let sum = match (far, other) {
            (None, None) => at(near, own),
            (None, Some(other)) => (3 * at(near, own) + at(near, other) + 2) >> 2,
            (Some(far), None) => (3 * at(near, own) + at(far, own) + 2) >> 2,
            (Some(far), Some(other)) => {
                let sides = 3 * (at(near, other) + at(far, own));
                (9 * at(near, own) + sides + at(far, other) + 8) >> 4
            }
        };
        *value = sum as u16;
    }
}

/// The same in floats, of what `value_of` makes of samples.
pub(super) fn floats(near: &[u16], far: &[u16], value_of: &[f32], row: &mut [f32]) {
    let last = row.len() - 1;
    for (column, value) in row.iter_mut().enumerate() {
        let own = column / 2;
        let is_edge = column == 0 || (column == last && column % 2 == 1);
        let other = if is_edge { own } else { beside(column) };
        let at = |samples: &[u16], place: usize| value_of[usize::from(samples[place])];
        *value = at(near, own) * (9.0 / 16.0)
            + at(near, other) * (3.0 / 16.0)
            + at(far, own) * (3.0 / 16.0)
            + at(far, other) * (1.0 / 16.0);
    }
}
