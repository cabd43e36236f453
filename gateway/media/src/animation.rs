//! Animated WebP as animated PNG: FFmpeg's releases read the one and not the other. Frames laid over
//! those before them are within a level of what the reference's library shows.

use std::io::{Cursor, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::AnimationDecoder;
use image::codecs::webp::WebPDecoder;

use crate::decode::{webp_canvas, webp_frames};
use crate::error::MediaError;
use crate::types::ImageSize;

const FORMAT: &str = "WebP";
/// Longest time in milliseconds that a frame of a PNG can say.
const MAX_DELAY_MS: u32 = u16::MAX as u32;
const MS_PER_S: u16 = 1000;

/// An animated WebP, known by its chunks alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WebpAnimation {
    /// Of every frame, as shown.
    pub size: ImageSize,
    /// At least one.
    pub num_frames: u32,
}

/// Bytes that end in an error when there are too many.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl Write for Bounded {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + piece.len() > self.limit {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl WebpAnimation {
    /// Most bytes of memory for each pixel of the picture while frames are made again: what has been
    /// drawn, the frame as decoded, as shown and, twice, as packed.
    pub const BYTES_PER_PIXEL: u64 = 20;

    /// Whether a file says that it is one; looks at its first bytes only.
    pub fn is_one(bytes: &[u8]) -> bool {
        webp_canvas(bytes).is_some()
    }

    /// What the chunks of a file say; `None` if it is no animated WebP.
    ///
    /// # Errors
    /// `Unreadable` if a frame says another size than the file does: such a frame is decoded before
    /// anybody compares them.
    pub fn read(bytes: &[u8]) -> Result<Option<Self>, MediaError> {
        let Some(size) = webp_canvas(bytes) else { return Ok(None) };
        let mut num_frames = 0;
        for coded in webp_frames(bytes) {
            num_frames += 1;
            if coded.is_some_and(|frame| frame.width > size.width || frame.height > size.height) {
                return Err(unreadable("a frame is larger than the picture".to_owned()));
            }
        }
        Ok((num_frames > 0 && size.pixels() > 0).then_some(Self { size, num_frames }))
    }

    /// Pixels of all frames.
    pub fn pixels(&self) -> u64 {
        self.size.pixels().saturating_mul(self.num_frames.into())
    }

    /// The same as an animated PNG of at most `max_bytes`. `is_wanted` is asked before each frame;
    /// `None` if it said no.
    ///
    /// # Errors
    /// [`MediaError`]; no input panics.
    pub fn as_png(
        &self,
        bytes: &[u8],
        max_bytes: usize,
        is_wanted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<u8>>, MediaError> {
        let work = AssertUnwindSafe(|| self.rewrite(bytes, max_bytes, is_wanted));
        let nonsense = |_| unreadable("its data makes no sense to the decoder".to_owned());
        catch_unwind(work).map_err(nonsense)?
    }

    fn rewrite(
        &self,
        bytes: &[u8],
        max_bytes: usize,
        is_wanted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<u8>>, MediaError> {
        let decoder =
            WebPDecoder::new(Cursor::new(bytes)).map_err(|e| unreadable(e.to_string()))?;
        let mut out = Bounded { bytes: Vec::new(), limit: max_bytes };
        let too_large = |error: png::EncodingError| match error {
            png::EncodingError::IoError(_) => {
                unreadable(format!("its frames take more than {max_bytes} bytes, packed"))
            }
            other => unreadable(other.to_string()),
        };
        let mut encoder = png::Encoder::new(&mut out, self.size.width, self.size.height);
        encoder.set_color(png::ColorType::Rgba);
        encoder.set_compression(png::Compression::Fast);
        encoder.set_animated(self.num_frames, 0).map_err(too_large)?;
        let mut writer = encoder.write_header().map_err(too_large)?;
        let mut frames = decoder.into_frames();
        loop {
            if !is_wanted() {
                return Ok(None);
            }
            let Some(frame) = frames.next() else { break };
            let frame = frame.map_err(|error| unreadable(error.to_string()))?;
            let (above, below) = frame.delay().numer_denom_ms();
            let delay_ms = above / below.max(1);
            let (ticks, per_s) = match u16::try_from(delay_ms) {
                Ok(delay) => (delay, MS_PER_S),
                Err(_) => ((delay_ms / u32::from(MS_PER_S)).min(MAX_DELAY_MS) as u16, 1),
            };
            writer.set_frame_delay(ticks, per_s).map_err(too_large)?;
            writer.write_image_data(frame.buffer().as_raw()).map_err(too_large)?;
        }
        writer.finish().map_err(too_large)?;
        Ok(Some(out.bytes))
    }
}

fn unreadable(reason: String) -> MediaError {
    MediaError::Unreadable { format: FORMAT, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three frames of 24x20, the second only a part of the picture: `frames.webp` and, drawn by the
    /// reference's library, every pixel of each.
    const FILE: &[u8] = include_bytes!("../../../tests/data/media_own/moving.webp");
    const SHOWN: &[u8] = include_bytes!("../../../tests/data/media_own/moving.rgba");

    #[test]
    fn every_frame_and_its_time_is_that_of_the_reference() {
        let animation = WebpAnimation::read(FILE).unwrap().unwrap();
        let ImageSize { width, height } = animation.size;
        assert_eq!((width, height, animation.num_frames), (24, 20, 3));

        let made = animation.as_png(FILE, 1 << 20, &mut || true).unwrap().unwrap();

        let mut reader = png::Decoder::new(Cursor::new(made)).read_info().unwrap();
        for (expected, delay_ms) in SHOWN.chunks(24 * 20 * 4).zip([120, 250, 70_000]) {
            let mut pixels = vec![0; expected.len()];
            reader.next_frame(&mut pixels).unwrap();
            let pairs = pixels.chunks(4).zip(expected.chunks(4)).enumerate();
            for (place, (found, expected)) in pairs {
                // the decoder blends in fixed point, and is one too low at times
                let distance = found.iter().zip(expected).map(|(a, b)| a.abs_diff(*b)).max();
                assert!(
                    distance <= Some(1),
                    "pixel {place} of the frame of {delay_ms} ms: {found:?} is not {expected:?}"
                );
            }
            let control = reader.info().frame_control.unwrap();
            let delay = u32::from(control.delay_num) * 1000 / u32::from(control.delay_den);
            assert_eq!(delay, delay_ms);
        }
        assert!(reader.next_frame(&mut vec![0; 24 * 20 * 4]).is_err());
    }

    #[test]
    fn too_many_bytes_a_cut_file_and_one_that_lies_are_refused() {
        let animation = WebpAnimation::read(FILE).unwrap().unwrap();
        let refused = animation.as_png(FILE, 200, &mut || true).unwrap_err();
        assert!(refused.to_string().contains("more than 200 bytes"), "{refused}");
        assert!(animation.as_png(&FILE[..FILE.len() - 40], 1 << 20, &mut || true).is_err());
        assert_eq!(animation.as_png(FILE, 1 << 20, &mut || false), Ok(None));
        assert_eq!(WebpAnimation::read(b"GIF89a"), Ok(None));
        assert_eq!(WebpAnimation::read(b""), Ok(None));
        // a canvas smaller than its frames
        let mut lying = FILE.to_vec();
        lying[24] = 3;
        let found = WebpAnimation::read(&lying).unwrap().unwrap();
        assert_eq!(found.size.width, 4);
        assert!(found.as_png(&lying, 1 << 20, &mut || true).is_err());
    }

    #[test]
    fn a_lossy_frame_larger_than_the_picture_is_refused_undecoded() {
        let file = |width: u8| {
            let frame =
                [b"VP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a".as_slice(), &[width, 0, 2, 0]].concat();
            let start = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\x07\0\0\x03\0\0".as_slice();
            [start, b"ANMF\x22\0\0\0".as_slice(), &[0; 16], &frame].concat()
        };
        let size = ImageSize { width: 8, height: 4 };
        assert_eq!(WebpAnimation::read(&file(8)), Ok(Some(WebpAnimation { size, num_frames: 1 })));
        let refused = WebpAnimation::read(&file(9)).unwrap_err();
        assert!(refused.to_string().contains("larger than the picture"), "{refused}");
    }
}
