//! AVIF pictures: planned here, their AV1 decoded by a child, their colours made here again.

use bytes::Bytes;
use gateway_media::decode::DecodeLimits;
use gateway_media::decode::avif::AvifPlan;
use gateway_media::{ImageSize, MediaError, RgbFrame};

use super::ffmpeg::MemoryFile;
use super::source::memory_failure;
use super::work::Share;
use super::{MediaLoader, media_refusal};
use crate::error::GatewayError;

impl MediaLoader {
    /// A picture of a caller who has its size, `displayed`, from its header.
    ///
    /// # Errors
    /// As [`Self::avif`].
    pub(crate) async fn avif_frame(
        &self,
        bytes: Bytes,
        displayed: ImageSize,
    ) -> Result<RgbFrame, GatewayError> {
        self.avif(&bytes, displayed.pixels(), &Share::default()).await
    }

    /// The picture as displayed, at the size that its header tells.
    ///
    /// # Errors
    /// `MediaRejected` for what is damaged or not supported; as [`super::ffmpeg::Ffmpeg::planes`].
    pub(super) async fn avif(
        &self,
        bytes: &Bytes,
        pixels: u64,
        share: &Share,
    ) -> Result<RgbFrame, GatewayError> {
        let limits = DecodeLimits { max_pixels: self.limits.max_image_pixels };
        let (file, length) = (bytes.clone(), bytes.len() as u64);
        let copying = self.rooms.run(share, length, move |_| {
            let streams = AvifPlan::read(&file, &limits)?.streams();
            let copied = streams.into_iter().map(|mut stream| {
                let ivf = std::mem::take(&mut stream.ivf);
                MemoryFile::new(&ivf).map(|file| (file, stream))
            });
            Ok::<_, MediaError>(copied.collect::<std::io::Result<Vec<_>>>())
        });
        let streams = copying.await?.map_err(media_refusal)?;
        let mut decoded = Vec::new();
        for (file, stream) in streams.map_err(|error| memory_failure(&error))? {
            decoded.push(self.ffmpeg.planes(&file, &stream, &share.processes).await?);
        }
        let file = bytes.clone();
        let joining = self
            .rooms
            .run(share, pixels, move |_| AvifPlan::read(&file, &limits)?.picture(decoded));
        joining.await?.map_err(media_refusal)
    }
}
