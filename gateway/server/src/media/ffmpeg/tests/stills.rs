//! Planes of AVIF pictures.

use super::*;
use gateway_media::decode::DecodeLimits;
use gateway_media::decode::avif::{Av1Stream, AvifPlan};

fn streams(name: &str) -> Vec<(MemoryFile, Av1Stream)> {
    let bytes = std::fs::read(media_directory().join("../avif").join(name)).unwrap();
    let plan = AvifPlan::read(&bytes, &DecodeLimits::default()).unwrap();
    let with_file = |stream: Av1Stream| (MemoryFile::new(&stream.ivf).unwrap(), stream);
    plan.streams().into_iter().map(with_file).collect()
}

#[tokio::test]
async fn all_tiles_and_their_transparency_come_as_promised() {
    let ffmpeg = ffmpeg();
    for name in ["grid_444_a.avif", "420_12bit.avif", "400.avif"] {
        for (file, stream) in streams(name) {
            let planes = ffmpeg.planes(&file, &stream, &Flow::default()).await.unwrap();
            assert_eq!(planes.len(), stream.num_bytes, "{name}");
            assert!(planes.iter().any(|byte| *byte != planes[0]), "{name} is a picture");
        }
    }
    assert_eq!(ffmpeg.metrics.video_processes_now(), 0);
}

#[tokio::test]
async fn more_or_less_than_promised_and_no_decoder_are_named() {
    let ffmpeg = ffmpeg();
    let (file, mut stream) = streams("420.avif").remove(0);
    for change in [-1, 1] {
        stream.num_bytes = stream.num_bytes.saturating_add_signed(change);
        let refused = ffmpeg.planes(&file, &stream, &Flow::default()).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::MediaRejected);
        assert!(refused.message.contains("AVIF image cannot be decoded"), "{refused}");
        stream.num_bytes = stream.num_bytes.saturating_add_signed(-change);
    }
    let nowhere = Ffmpeg::find(None, limits(), Arc::new(Metrics::default()));
    let refused = nowhere.planes(&file, &stream, &Flow::default()).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::MediaUnavailable);
    assert!(refused.message.contains("AVIF pictures cannot be read"), "{refused}");
}
