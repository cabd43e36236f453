//! A clip's bytes as a file that FFmpeg reads: copied, or made of an animation that it does not know.

use std::time::Instant;

use bytes::Bytes;
use gateway_media::MediaError;
use gateway_media::animation::WebpAnimation;

use super::ffmpeg::{MemoryFile, too_slow};
use super::source::memory_failure;
use super::work::{Left, Share};
use super::{MediaLoader, limits, media_refusal};
use crate::error::GatewayError;

/// What has to be done with a clip's bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum ClipForm {
    /// Nothing.
    AsSent,
    /// To be written again as an animated PNG.
    Animation(WebpAnimation),
}

impl ClipForm {
    /// Pixels that are decoded for it.
    pub(super) fn pixels(self) -> u64 {
        match self {
            Self::AsSent => 0,
            Self::Animation(animation) => animation.pixels(),
        }
    }
}

impl MediaLoader {
    /// Looks at a clip's first bytes, and if it is an animation at all of its chunks.
    ///
    /// # Errors
    /// `MediaRejected` for an animation that contradicts itself or passes a limit.
    pub(super) async fn clip_form(
        &self,
        bytes: &Bytes,
        share: &Share,
    ) -> Result<ClipForm, GatewayError> {
        if !WebpAnimation::is_one(bytes) {
            return Ok(ClipForm::AsSent);
        }
        let (file, length) = (bytes.clone(), bytes.len() as u64);
        let reading = self.rooms.run(share, length, move |_| WebpAnimation::read(&file));
        let Some(animation) = reading.await?.map_err(media_refusal)? else {
            return Ok(ClipForm::AsSent);
        };
        limits::check_animation(animation, &self.limits)?;
        Ok(ClipForm::Animation(animation))
    }

    /// A clip's bytes where FFmpeg finds them.
    ///
    /// # Errors
    /// `MediaRejected` for an animation that is damaged, `DeadlineExceeded` for one that takes too
    /// long; `Internal` if the system gave no memory.
    pub(super) async fn clip_file(
        &self,
        bytes: Bytes,
        form: ClipForm,
        share: &Share,
    ) -> Result<MemoryFile, GatewayError> {
        let made = match form {
            ClipForm::AsSent => {
                let length = bytes.len() as u64;
                self.rooms.run(share, length, move |_| MemoryFile::new(&bytes)).await?
            }
            ClipForm::Animation(animation) => self.rewritten(bytes, animation, share).await?,
        };
        made.map_err(|error| memory_failure(&error))
    }

    /// An animation within the memory and the time that one item may have.
    async fn rewritten(
        &self,
        bytes: Bytes,
        animation: WebpAnimation,
        share: &Share,
    ) -> Result<std::io::Result<MemoryFile>, GatewayError> {
        let drawing = animation.size.pixels().saturating_mul(WebpAnimation::BYTES_PER_PIXEL);
        // what is written is there twice until it is a file
        let memory = drawing.saturating_add(self.max_bytes.saturating_mul(2));
        let _memory = self.rooms.memory(share, memory).await;
        let max_bytes = usize::try_from(self.max_bytes).unwrap_or(usize::MAX);
        let timeout = self.timeout;
        let making = self.rooms.run(share, animation.pixels(), move |watch| {
            let end = Instant::now() + timeout;
            let is_wanted = &mut || watch.check() != Err(Left) && Instant::now() < end;
            let made = animation.as_png(&bytes, max_bytes, is_wanted)?;
            Ok::<_, MediaError>(made.map(|made| MemoryFile::new(&made)))
        });
        making.await?.map_err(media_refusal)?.ok_or_else(|| too_slow(timeout))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use futures::FutureExt;
    use gateway_core::conversation::MediaRef;
    use gateway_core::model::{MediaKind, SizeControls};
    use gateway_media::mp4::ReadAt;

    use super::super::source::{ClipData, Content};
    use super::*;
    use crate::admission::Admission;
    use crate::config::{MediaConfig, MediaLimits};
    use crate::error::ErrorKind;
    use crate::telemetry::Metrics;

    /// Three frames of 24x20.
    const MOVING: &[u8] = include_bytes!("../../../../tests/data/media_own/moving.webp");
    const A_MINUTE: Duration = Duration::from_secs(60);

    /// One thread, a GiB to decode in, and at most so many pixels a request.
    fn loader(timeout: Duration, max_decoded_pixels: u64) -> MediaLoader {
        let limits = MediaLimits {
            max_bytes: 1 << 20,
            max_images: 9,
            max_videos: 9,
            max_tokens: None,
            max_frames: 999,
            max_decoded_pixels,
            max_image_pixels: 64_000_000,
            max_video_duration: Duration::from_secs(999),
        };
        let config = MediaConfig {
            max_bytes: 1 << 20,
            limits,
            work_bytes: 1 << 30,
            cache_bytes: 1 << 20,
            threads: 1,
            max_video_processes: 1,
            timeout,
            allowed_hosts: Vec::new(),
            allow_private: false,
            proxy: None,
            root: None,
        };
        MediaLoader::new(&config, Arc::new(Metrics::default())).unwrap()
    }

    /// A file of some kB whose frames of one pixel each stand in 8000x8000.
    fn bomb(num_frames: usize) -> Bytes {
        let side = &7999_u32.to_le_bytes()[..3];
        let start = [b"WEBPVP8X\x0a\0\0\0\x12\0\0\0".as_slice(), side, side].concat();
        let background = b"ANIM\x06\0\0\0\0\0\0\0\0\0";
        let pixel = b"VP8L\x08\0\0\0\x2f\0\0\0\x10\x88\x88\x08";
        let frame = [b"ANMF\x20\0\0\0".as_slice(), &[0; 16], pixel].concat();
        let body = [start.as_slice(), background, &frame.repeat(num_frames)].concat();
        Bytes::from([b"RIFF".as_slice(), &(body.len() as u32).to_le_bytes(), &body].concat())
    }

    async fn file_of(loader: &MediaLoader, bytes: Bytes) -> Result<MemoryFile, GatewayError> {
        let share = Share::default();
        let form = loader.clip_form(&bytes, &share).await?;
        loader.clip_file(bytes, form, &share).await
    }

    #[tokio::test]
    async fn an_animation_has_as_much_time_as_a_run_of_ffmpeg() {
        let hasty = loader(Duration::ZERO, 50_000_000_000);
        for bytes in [Bytes::from_static(MOVING), bomb(700)] {
            let late = file_of(&hasty, bytes).await.unwrap_err();
            assert_eq!(late.kind, ErrorKind::DeadlineExceeded, "{late}");
        }
        let patient = loader(A_MINUTE, 50_000_000_000);
        assert!(file_of(&patient, Bytes::from_static(MOVING)).await.unwrap().length() > 0);
        let refused = file_of(&patient, bomb(800)).await.unwrap_err();
        assert!(refused.message.contains("51200000000 pixels"), "{refused}");
    }

    #[tokio::test]
    async fn a_large_animation_waits_for_the_memory_that_drawing_it_takes() {
        let loader = loader(A_MINUTE, 50_000_000_000);
        let elsewhere = loader.rooms.memory(&Share::default(), 1 << 29).await;

        assert!(file_of(&loader, Bytes::from_static(MOVING)).await.is_ok(), "a small one fits");
        let mut large = Box::pin(file_of(&loader, bomb(1)));
        while loader.rooms.waiting_for_memory() == 0 {
            let made = futures::poll!(large.as_mut());
            assert!(made.is_pending(), "nothing has become of it yet");
            tokio::task::yield_now().await;
        }
        drop(large);
        drop(elsewhere);
    }

    #[tokio::test]
    async fn chunks_of_an_animation_are_read_on_a_pixel_thread() {
        let loader = loader(A_MINUTE, 50_000_000_000);
        let share = Share::default();
        let (tell, told) = std::sync::mpsc::channel::<()>();
        let mut busy = Box::pin(loader.rooms.run(&share, 1, move |_| told.recv().is_err()));
        assert!(busy.as_mut().now_or_never().is_none());

        let (bytes, share) = (bomb(800), Share::default());
        let mut reading = Box::pin(loader.clip_form(&bytes, &share));
        assert!(reading.as_mut().now_or_never().is_none(), "the one thread is taken");

        drop(tell);
        assert!(busy.await.unwrap());
        assert_eq!(reading.await.unwrap_err().kind, ErrorKind::MediaRejected);
    }

    #[tokio::test]
    async fn animations_of_a_request_are_counted_together_before_any_is_rewritten() {
        let loader = loader(A_MINUTE, 2000);
        let share = Share::default();
        let of = |bytes: &[u8]| {
            loader.source_of(Bytes::copy_from_slice(bytes), MediaKind::Video, &share)
        };
        // 1440 pixels each
        assert!(of(MOVING).await.is_ok());
        let cut = &MOVING[..MOVING.len() - 40];
        for bytes in [cut, MOVING] {
            let refused = of(bytes).await.unwrap_err();
            assert_eq!(refused.code, "media_limit_exceeded", "{refused}");
        }
        let other = Share::default();
        let alone = loader.source_of(Bytes::from_static(MOVING), MediaKind::Video, &other);
        assert!(alone.await.is_ok());
    }

    #[tokio::test]
    async fn what_an_animation_has_become_is_held_under_the_budget() {
        let loader = loader(A_MINUTE, 50_000_000_000);
        let door = Admission::new(1, 1 << 20, Arc::default(), Arc::new(Metrics::default()));
        let item = Arc::new(MediaRef {
            kind: MediaKind::Video,
            url: format!("data:;base64,{}", STANDARD.encode(MOVING)),
            controls: SizeControls::default(),
            param: "data".to_owned(),
        });

        let made = loader.source(&item, &door, &Share::default()).await.unwrap();
        let again = loader.source(&item, &door, &Share::default()).await.unwrap();

        let Content::Clip { data: ClipData::File(file), .. } = &made.content else {
            panic!("it was made")
        };
        assert!(file.length() > 1910, "{} bytes", file.length());
        assert!(made.held_bytes() >= file.length(), "{} bytes", made.held_bytes());
        // whoever sends it makes it again
        assert!(matches!(again.content, Content::Clip { data: ClipData::Unread(_), .. }));
        assert!(again.held_bytes() >= file.length());
    }
}
