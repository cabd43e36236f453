//! Chosen frames of a clip, one after the other, as FFmpeg writes them.

use std::time::Duration;

use gateway_media::RgbFrame;
use tokio::io::AsyncReadExt;
use tokio::process::ChildStdout;

use super::confine::Confined;
use super::{ClipProbe, rejected, select, too_slow};
use crate::error::GatewayError;

/// Conversion to RGB that gives the same bytes on every processor.
const EXACT: &str = "bicubic+accurate_rnd+full_chroma_int+bitexact";

/// The filter graph: choose, convert at the size the container promised, turn upright.
pub(super) fn filter(probe: &ClipProbe, frames: &[u64]) -> String {
    let chosen = select::expression(frames);
    let (width, height) = (probe.coded.width, probe.coded.height);
    let turn = if probe.turn.is_empty() { String::new() } else { format!(",{}", probe.turn) };
    // scaling changes nothing unless the stream changes its size, and then keeps ours
    format!("select='{chosen}',scale={width}:{height}:flags={EXACT},format=rgb24{turn}")
}

/// Frames on their way from a child process; dropping it ends the child.
pub struct FrameStream {
    child: Confined,
    output: ChildStdout,
    size: gateway_media::ImageSize,
    expected: usize,
    given: usize,
    /// Time still allowed for waiting on the child; waiting on others costs it nothing.
    patience: Duration,
    limit: Duration,
}

impl FrameStream {
    pub(super) fn new(
        mut child: Confined,
        probe: &ClipProbe,
        expected: usize,
        limit: Duration,
    ) -> Result<Self, GatewayError> {
        let output = child
            .take_output()
            .ok_or_else(|| GatewayError::internal("the child's output was already taken"))?;
        let size = probe.info.size;
        Ok(Self { child, output, size, expected, given: 0, patience: limit, limit })
    }

    /// The next frame, upright; `None` after the last one asked for.
    ///
    /// # Errors
    /// `MediaRejected` if the clip gives fewer frames than it promised, `DeadlineExceeded`.
    pub async fn next(&mut self) -> Result<Option<RgbFrame>, GatewayError> {
        if self.given == self.expected {
            return Ok(None);
        }
        let mut pixels = vec![0; self.size.pixels() as usize * 3];
        let begin = tokio::time::Instant::now();
        match tokio::time::timeout(self.patience, self.output.read_exact(&mut pixels)).await {
            Err(_) => Err(too_slow(self.limit)),
            Ok(Err(_)) => Err(self.cut_short()),
            Ok(Ok(_)) => {
                self.patience = self.patience.saturating_sub(begin.elapsed());
                self.given += 1;
                Ok(Some(RgbFrame { size: self.size, pixels }))
            }
        }
    }

    /// The child's process id, while it runs.
    #[cfg(test)]
    pub(super) fn child_id(&self) -> Option<u32> {
        self.child.id()
    }

    fn cut_short(&mut self) -> GatewayError {
        let (given, expected) = (self.given, self.expected);
        rejected(&format!(
            "the clip is damaged: only {given} of the {expected} chosen frames could be decoded"
        ))
        .because(self.child.messages())
    }
}
