//! Planes of AV1 pictures: what an AVIF file holds, decoded by a child as clips are.

use gateway_media::decode::avif::Av1Stream;
use tokio::io::AsyncReadExt;
use tokio::time::Instant;

use super::{Ffmpeg, MemoryFile, START_PIXELS, rejected, strings, too_slow};
use crate::error::{ErrorKind, GatewayError};
use crate::media::fair::Flow;

impl Ffmpeg {
    /// The planes of all pictures of a stream, `stream.num_bytes` of them, as they are coded.
    ///
    /// # Errors
    /// `MediaUnavailable` without FFmpeg, `MediaRejected` if it gives more or less, and
    /// `DeadlineExceeded`; what the system said, as `Internal`.
    pub async fn planes(
        &self,
        file: &MemoryFile,
        stream: &Av1Stream,
        flow: &Flow,
    ) -> Result<Vec<u8>, GatewayError> {
        if let Some(missing) = self.missing() {
            let message = format!("AVIF pictures cannot be read: {missing}");
            return Err(GatewayError::new(ErrorKind::MediaUnavailable, message));
        }
        let sync = self.sync_option(flow).await?;
        let pixels = stream.frame_pixels.saturating_mul(stream.num_frames as u64);
        let place = self.enter(flow, START_PIXELS.saturating_add(pixels)).await;
        let arguments = self.still_arguments(file, stream, sync);
        let program = &self.programs()?.ffmpeg;
        let mut child = self.start(program, &arguments, Some(file), place)?;
        let mut output = child
            .take_output()
            .ok_or_else(|| GatewayError::internal("the child's output was already taken"))?;
        let mut planes = Vec::with_capacity(stream.num_bytes);
        let deadline = Instant::now() + self.limits.timeout;
        let reading = async {
            // one more than promised is wrong already
            let most = stream.num_bytes as u64 + 1;
            (&mut output).take(most).read_to_end(&mut planes).await
        };
        match tokio::time::timeout_at(deadline, reading).await {
            Err(_) => Err(too_slow(self.limits.timeout)),
            Ok(Err(error)) => Err(GatewayError::internal(format!("ffmpeg: {error}"))),
            Ok(Ok(count)) if count == stream.num_bytes => Ok(planes),
            Ok(Ok(_)) => {
                let message = "the AVIF image cannot be decoded: its data is damaged";
                Err(rejected(message).because(child.messages()))
            }
        }
    }

    /// One argument vector, written by us alone. No pixel format is asked for: planes come as
    /// they are coded, converted by nobody.
    fn still_arguments(&self, file: &MemoryFile, stream: &Av1Stream, sync: &str) -> Vec<String> {
        let (threads, frames) = (self.threads.to_string(), stream.num_frames.to_string());
        // frames as coded are padded
        let max_pixels = (stream.frame_pixels.saturating_mul(5) / 4).saturating_add(1 << 16);
        let mut arguments = strings(&["-nostdin", "-hide_banner", "-loglevel", "error"]);
        arguments.extend(strings(&["-threads", &threads, "-protocol_whitelist", "file"]));
        arguments.extend(strings(&["-max_pixels", &max_pixels.to_string()]));
        arguments.extend(strings(&["-format_whitelist", "ivf", "-f", "ivf"]));
        arguments.extend(strings(&["-c:v", "libdav1d", "-i", &file.path_in_child()]));
        arguments.extend(strings(&["-map", "0:v:0", sync, "passthrough"]));
        arguments.extend(strings(&["-frames:v", &frames, "-f", "rawvideo", "pipe:1"]));
        arguments
    }
}
