//! Samples of every layout to 8-bit RGB, in the arithmetic of the reference's image library.

/// Samples of a decoded picture, interleaved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Grey.
    Grey,
    /// Grey and alpha.
    GreyAlpha,
    /// Red, green, blue.
    Rgb,
    /// Red, green, blue, alpha.
    Rgba,
}

/// RGB bytes of 8-bit samples; transparency shows white.
pub(super) fn to_rgb(mut samples: Vec<u8>, layout: Layout) -> Vec<u8> {
    match layout {
        Layout::Rgb => samples,
        Layout::Grey => samples.into_iter().flat_map(|grey| [grey; 3]).collect(),
        Layout::GreyAlpha => {
            compact(&mut samples, |[grey, alpha]| [over_white(grey, alpha)]);
            to_rgb(samples, Layout::Grey)
        }
        Layout::Rgba => {
            compact(&mut samples, |[r, g, b, alpha]| [r, g, b].map(|c| over_white(c, alpha)));
            samples
        }
    }
}

/// The high bytes of native-endian 16-bit samples.
///
/// The reference's library does the same for colour; for grey it clips at 255 instead, which shows
/// almost every 16-bit grey picture white, and which we take for a fault.
pub(super) fn high_bytes(mut samples: Vec<u8>) -> Vec<u8> {
    compact(&mut samples, |word| [(u16::from_ne_bytes(word) >> 8) as u8]);
    samples
}

/// RGB bytes of CMYK samples as Adobe stores them: 255 is no ink.
///
/// JPEG files say nowhere else which way round they are, and the reference's library takes all of
/// them for Adobe's.
pub(super) fn inverted_cmyk_to_rgb(mut samples: Vec<u8>) -> Vec<u8> {
    compact(&mut samples, |[c, m, y, k]| {
        // k is the light that the black ink lets through, and the colour inks take their part of it
        [c, m, y].map(|light| k.saturating_sub(scaled(255 - light, k)))
    });
    samples
}

/// Turns every `N` bytes into `M`, no more than `N`, in place: large pictures are not held twice.
fn compact<const N: usize, const M: usize>(
    samples: &mut Vec<u8>,
    convert: impl Fn([u8; N]) -> [u8; M],
) {
    let count = samples.len() / N;
    for index in 0..count {
        let mut pixel = [0; N];
        pixel.copy_from_slice(&samples[index * N..][..N]);
        samples[index * M..][..M].copy_from_slice(&convert(pixel));
    }
    samples.truncate(count * M);
}

/// `colour` at opacity `alpha` on white.
fn over_white(colour: u8, alpha: u8) -> u8 {
    let blend = u32::from(colour) * u32::from(alpha) + 255 * (255 - u32::from(alpha));
    ((blend + 127) / 255) as u8
}

/// `a * b / 255`, rounded to nearest.
fn scaled(a: u8, b: u8) -> u8 {
    ((u32::from(a) * u32::from(b) + 127) / 255) as u8
}

#[cfg(test)]
mod tests {
    use super::{Layout, high_bytes, inverted_cmyk_to_rgb, to_rgb};

    #[test]
    fn transparent_pixels_show_white_and_opaque_ones_themselves() {
        let rgba = vec![220, 30, 40, 255, 9, 9, 9, 0, 0, 100, 200, 128];
        assert_eq!(to_rgb(rgba, Layout::Rgba), [220, 30, 40, 255, 255, 255, 127, 177, 227]);
        assert_eq!(to_rgb(vec![7, 255, 7, 0], Layout::GreyAlpha), [7, 7, 7, 255, 255, 255]);
        assert_eq!(to_rgb(vec![7, 8], Layout::Grey), [7, 7, 7, 8, 8, 8]);
    }

    #[test]
    fn sixteen_bits_keep_their_high_byte() {
        let words: Vec<u8> = [0_u16, 255, 256, 0x7fff, 0xffff].map(u16::to_ne_bytes).concat();
        assert_eq!(high_bytes(words), [0, 0, 1, 0x7f, 0xff]);
    }

    #[test]
    fn adobe_inks_become_their_colours() {
        // stored inverted: no ink anywhere, then cyan, magenta, yellow, black
        let inks = vec![
            255, 255, 255, 255, 0, 255, 255, 255, 255, 0, 255, 255, 255, 255, 0, 255, 255, 255,
            255, 0,
        ];
        let colours = [255, 255, 255, 0, 255, 255, 255, 0, 255, 255, 255, 0, 0, 0, 0];
        assert_eq!(inverted_cmyk_to_rgb(inks), colours);
    }
}
