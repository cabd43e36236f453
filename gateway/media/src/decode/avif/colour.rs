//! Planes of luma and colour differences to 8-bit RGB, in the arithmetic of the reference's library.
//!
//! Source: libavif 1.4.2 with libyuv 1924 as Pillow 13 has them, called as Pillow calls them:
//! fixed-point where libyuv has a function, else single floats. The golden file of the tests holds
//! what they gave.

use super::planes::{Chroma, Planes};
use super::{unsupported, upsample};
use crate::error::MediaError;

/// How colours were coded, in the numbers of ITU-T H.273.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Colour {
    pub(super) primaries: u16,
    pub(super) matrix: u16,
    /// Samples use all values.
    pub(super) is_full: bool,
}

/// What to multiply with, in 64ths; Y in 64ths of 256 / 257 of 2^16.
#[derive(Clone, Copy)]
struct Factors {
    blue_of_u: i32,
    green_of_u: i32,
    green_of_v: i32,
    red_of_v: i32,
    y: u32,
    offset: i32,
}

impl Factors {
    const fn new(uv: [i32; 4], y: u32, offset: i32) -> Self {
        let [blue_of_u, green_of_u, green_of_v, red_of_v] = uv;
        Self { blue_of_u, green_of_u, green_of_v, red_of_v, y, offset }
    }
}

const LIMITED_601: Factors = Factors::new([128, 25, 52, 102], 18_997, -1160);
const FULL_601: Factors = Factors::new([113, 22, 46, 90], 16_320, 32);
const LIMITED_709: Factors = Factors::new([128, 14, 34, 115], 18_997, -1160);
const FULL_709: Factors = Factors::new([119, 12, 30, 101], 16_320, 32);
const LIMITED_2020: Factors = Factors::new([128, 12, 42, 107], 19_003, -1160);
const FULL_2020: Factors = Factors::new([120, 11, 37, 94], 16_320, 32);

const IDENTITY: u16 = 0;
const FCC: u16 = 4;
const SMPTE_240: u16 = 7;

impl Colour {
    /// # Errors
    /// Refuses what the reference's library refuses, and what no file was found to use.
    pub(super) fn checked(self, chroma: Chroma) -> Result<Self, MediaError> {
        let is_known = match self.matrix {
            IDENTITY => chroma == Chroma::Full,
            FCC | SMPTE_240 => true,
            _ => self.factors().is_some(),
        };
        if is_known || chroma == Chroma::None {
            return Ok(self);
        }
        let Self { matrix, primaries, .. } = self;
        Err(unsupported(format!("colour matrix {matrix} with primaries {primaries}")))
    }

    fn factors(self) -> Option<Factors> {
        let of = |limited, full| Some(if self.is_full { full } else { limited });
        match (self.matrix, self.primaries) {
            (1, _) | (12, 1 | 2) => of(LIMITED_709, FULL_709),
            (2 | 5 | 6, _) | (12, 5 | 6) => of(LIMITED_601, FULL_601),
            (9, _) | (12, 9) => of(LIMITED_2020, FULL_2020),
            _ => None,
        }
    }
}

/// How a picture is converted.
enum Way {
    /// At this many bits of a sample; colours of the nearest sample, or smoothed.
    Fixed {
        factors: Factors,
        depth: u8,
        is_nearest: bool,
    },
    Float,
}

fn way(planes: &Planes, colour: Colour, has_alpha: bool) -> Way {
    let is_grey = planes.chroma == Chroma::None;
    let factors = match colour.factors() {
        None if is_grey && colour.matrix == IDENTITY => {
            Some(if colour.is_full { FULL_601 } else { LIMITED_601 })
        }
        factors => factors,
    };
    let Some(factors) = factors.filter(|_| has_alpha || !is_grey) else { return Way::Float };
    let is_nearest = has_alpha && planes.depth == 12 && planes.chroma == Chroma::Quarter;
    let is_exact = is_nearest || (has_alpha && !is_grey && planes.depth == 10);
    Way::Fixed { factors, depth: if is_exact { planes.depth } else { 8 }, is_nearest }
}

/// Interleaved R G B, or R G B A when there is an alpha plane, and whether it multiplied the colours.
pub(super) fn samples(planes: &Planes, alpha: Option<&(Planes, bool)>, colour: Colour) -> Vec<u8> {
    let (width, height) = Planes::plane_size(planes.size, planes.chroma, 0);
    let channels = if alpha.is_some() { 4 } else { 3 };
    let mut out = vec![0; width * height * channels];
    let way = way(planes, colour, alpha.is_some());
    let mut rows = Rows::new(planes);
    let float = matches!(way, Way::Float).then(|| Float::new(planes, colour));
    let mut alpha_row = vec![0; width];
    for (number, pixels) in out.chunks_exact_mut(width * channels).enumerate() {
        let transparency = alpha.map(|(alpha, is_premultiplied)| {
            alpha.row(0, number, &mut alpha_row);
            widen(&mut alpha_row, alpha.depth, alpha.is_full);
            (alpha_row.as_slice(), *is_premultiplied)
        });
        match (&way, &float) {
            (Way::Fixed { factors, depth, is_nearest }, _) => {
                rows.read(number, planes.depth - depth, *is_nearest);
                fixed_row(&rows, (*factors, *depth), pixels.chunks_exact_mut(channels));
                let is_cut = planes.chroma != Chroma::None && !is_nearest;
                if let Some((alpha, is_premultiplied)) = transparency {
                    put_alpha(alpha, planes.depth, is_cut, pixels);
                    if is_premultiplied {
                        pixels.as_chunks_mut::<4>().0.iter_mut().for_each(divide);
                    }
                }
            }
            (Way::Float, Some(float)) => {
                // smoothed colours are divided before they are rounded, others after
                let is_smoothed = matches!(planes.chroma, Chroma::Half | Chroma::Quarter);
                let divisor =
                    transparency.filter(|alpha| alpha.1 && is_smoothed).map(|alpha| alpha.0);
                float.row(&mut rows, number, divisor, pixels.chunks_exact_mut(channels));
                if let Some((alpha, is_premultiplied)) = transparency {
                    put_alpha(alpha, planes.depth, false, pixels);
                    if is_premultiplied && !is_smoothed {
                        pixels.as_chunks_mut::<4>().0.iter_mut().for_each(divide);
                    }
                }
            }
            (Way::Float, None) => {}
        }
    }
    out
}

/// Rows of the three planes as read, and of the colour differences for each pixel.
struct Rows<'a> {
    planes: &'a Planes,
    y: Vec<u16>,
    uv: [Vec<u16>; 2],
    near: Vec<u16>,
    far: Vec<u16>,
}

impl<'a> Rows<'a> {
    fn new(planes: &'a Planes) -> Self {
        let (width, _) = Planes::plane_size(planes.size, planes.chroma, 0);
        let (samples, _) = Planes::plane_size(planes.size, planes.chroma, 1);
        // of grey, in the middle
        let uv = [vec![128; width], vec![128; width]];
        Self { planes, y: vec![0; width], uv, near: vec![0; samples], far: vec![0; samples] }
    }

    /// Luma and integer colour differences of a pixel row, of samples without their last bits.
    fn read(&mut self, number: usize, dropped_bits: u8, is_nearest: bool) {
        let drop_bits = |row: &mut [u16]| row.iter_mut().for_each(|value| *value >>= dropped_bits);
        let planes = self.planes;
        planes.row(0, number, &mut self.y);
        drop_bits(&mut self.y);
        for plane in 1..Planes::count(planes.chroma) {
            if planes.chroma == Chroma::Full {
                planes.row(plane, number, &mut self.uv[plane - 1]);
                drop_bits(&mut self.uv[plane - 1]);
                continue;
            }
            let has_far = self.read_samples(plane, number);
            drop_bits(&mut self.near);
            drop_bits(&mut self.far);
            let row = &mut self.uv[plane - 1];
            if is_nearest {
                for (column, value) in row.iter_mut().enumerate() {
                    *value = self.near[column / 2];
                }
            } else {
                let far = has_far.then_some(self.far.as_slice());
                upsample::integers(&self.near, far, row);
            }
        }
    }

    /// The row of samples of a pixel row, and the one beside it, which may be missing.
    fn read_samples(&mut self, plane: usize, number: usize) -> bool {
        let (_, shift) = self.planes.chroma.shifts();
        self.planes.row(plane, number >> shift, &mut self.near);
        let beside =
            (shift > 0).then(|| upsample::row_beside(number, self.planes.size.height as usize));
        match beside.flatten() {
            Some(beside) => self.planes.row(plane, beside, &mut self.far),
            None => return false,
        }
        true
    }
}

/// A row of samples of `depth` bits in fixed point.
fn fixed_row<'p>(
    rows: &Rows<'_>,
    (factors, depth): (Factors, u8),
    pixels: impl Iterator<Item = &'p mut [u8]>,
) {
    let more_bits = i32::from(depth) - 8;
    for (((pixel, y), u), v) in pixels.zip(&rows.y).zip(&rows.uv[0]).zip(&rows.uv[1]) {
        let y = u32::from(*y);
        let y = match depth {
            8 => y * 0x0101,
            10 => y << 6 | y >> 4,
            _ => y << 4 | y >> 8,
        };
        let y = ((y * factors.y) >> 16) as i32 + factors.offset;
        let difference = |sample: u16| (i32::from(sample) >> more_bits).min(255) - 128;
        let (u, v) = (difference(*u), difference(*v));
        let byte = |value: i32| (value >> 6).clamp(0, 255) as u8;
        pixel[0] = byte(y + v * factors.red_of_v);
        pixel[1] = byte(y - (u * factors.green_of_u + v * factors.green_of_v));
        pixel[2] = byte(y + u * factors.blue_of_u);
    }
}

/// Transparency stored in fewer values, as all of them.
///
/// Source: `avifLimitedToFullY`.
fn widen(row: &mut [u16], depth: u8, is_full: bool) {
    if is_full {
        return;
    }
    let (least, most, full) = (16 << (depth - 8), 235 << (depth - 8), (1 << depth) - 1);
    for value in row {
        let widened = ((i32::from(*value) - least) * full + (most - least) / 2) / (most - least);
        *value = widened.clamp(0, full) as u16;
    }
}

/// Transparency in 8 bits: cut off, or rounded.
fn put_alpha(alpha: &[u16], depth: u8, is_cut: bool, pixels: &mut [u8]) {
    let most = f32::from((1_u16 << depth) - 1);
    for (pixel, value) in pixels.as_chunks_mut::<4>().0.iter_mut().zip(alpha) {
        pixel[3] = if is_cut {
            (value >> (depth - 8)) as u8
        } else {
            (0.5 + f32::from(*value) / most * 255.0) as u8
        };
    }
}

/// Takes the transparency out of colours that it multiplied.
///
/// Source: `ARGBUnattenuateRow_C` of libyuv.
fn divide(pixel: &mut [u8; 4]) {
    let inverse = match u32::from(pixel[3]) {
        0 => 0,
        255 => 0x100,
        1 => 0xffff,
        alpha => 0x1_0000 / alpha,
    };
    for value in &mut pixel[..3] {
        *value = ((u32::from(*value) * 0x0101 * inverse) >> 16).min(255) as u8;
    }
}

/// Single floats, as the built-in conversion of libavif has them.
struct Float {
    y_of: Vec<f32>,
    uv_of: Vec<f32>,
    kr: f32,
    kb: f32,
    is_identity: bool,
}

impl Float {
    fn new(planes: &Planes, colour: Colour) -> Self {
        let (depth, scale) = (planes.depth, f32::from(1_u16 << (planes.depth - 8)));
        let most = f32::from((1_u16 << depth) - 1);
        let (least, y_range, uv_range) = if colour.is_full {
            (0.0, most, most)
        } else {
            (16.0 * scale, 219.0 * scale, 224.0 * scale)
        };
        let is_identity = colour.matrix == IDENTITY;
        let table = |least: f32, range: f32| {
            (0..1_u16 << depth).map(|value| (f32::from(value) - least) / range).collect::<Vec<_>>()
        };
        let y_of = table(least, y_range);
        let uv_of = if is_identity { y_of.clone() } else { table(128.0 * scale, uv_range) };
        let (kr, kb) = match colour.matrix {
            FCC => (0.30, 0.11),
            _ => (0.212, 0.087),
        };
        Self { y_of, uv_of, kr, kb, is_identity }
    }

    fn row<'p>(
        &self,
        rows: &mut Rows<'_>,
        number: usize,
        divisor: Option<&[u16]>,
        pixels: impl Iterator<Item = &'p mut [u8]>,
    ) {
        let planes = rows.planes;
        planes.row(0, number, &mut rows.y);
        let mut uv = [vec![0.0; rows.y.len()], vec![0.0; rows.y.len()]];
        for plane in 1..Planes::count(planes.chroma) {
            let row = &mut uv[plane - 1];
            if planes.chroma == Chroma::Full {
                planes.row(plane, number, &mut rows.near);
                for (value, sample) in row.iter_mut().zip(&rows.near) {
                    *value = self.uv_of[usize::from(*sample)];
                }
                continue;
            }
            let far = if rows.read_samples(plane, number) { &rows.far } else { &rows.near };
            upsample::floats(&rows.near, far, &self.uv_of, row);
        }
        let is_grey = planes.chroma == Chroma::None;
        let most = f32::from((1_u16 << planes.depth) - 1);
        for (column, pixel) in pixels.enumerate() {
            let y = self.y_of[usize::from(rows.y[column])];
            let mut colours = match [y, uv[0][column], uv[1][column]] {
                _ if is_grey => [y; 3],
                [y, u, v] if self.is_identity => [v, y, u],
                [y, u, v] => self.matrixed(y, u, v),
            };
            for colour in &mut colours {
                *colour = colour.clamp(0.0, 1.0);
            }
            if let Some(divisor) = divisor {
                let alpha = f32::from(divisor[column]) / most;
                for colour in &mut colours {
                    *colour = if alpha == 0.0 { 0.0 } else { (*colour / alpha).min(1.0) };
                }
            }
            for (byte, colour) in pixel.iter_mut().zip(colours) {
                *byte = (0.5 + colour * 255.0) as u8;
            }
        }
    }

    fn matrixed(&self, y: f32, cb: f32, cr: f32) -> [f32; 3] {
        let (kr, kb) = (self.kr, self.kb);
        let kg = 1.0 - kr - kb;
        let red = y + (2.0 * (1.0 - kr)) * cr;
        let blue = y + (2.0 * (1.0 - kb)) * cb;
        let green = y - ((2.0 * ((kr * (1.0 - kr) * cr) + (kb * (1.0 - kb) * cb))) / kg);
        [red, green, blue]
    }
}
