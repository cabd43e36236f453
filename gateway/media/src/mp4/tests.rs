//! Files of the media set as ffprobe lists them, excerpts read back, and damage of every kind.

use std::path::Path;

use super::*;

fn file(name: &str) -> Vec<u8> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/media");
    std::fs::read(directory.join(name)).unwrap()
}

fn movie(name: &str) -> Movie {
    Movie::read(&file(name)[..]).unwrap_or_else(|| panic!("{name} is a plain file"))
}

/// The file with the last box of that name changed; the first names may be brands of the file.
fn changed(name: &str, kind: &[u8; 4], change: impl FnOnce(&mut [u8])) -> Option<Movie> {
    let mut bytes = file(name);
    let place = bytes.windows(4).rposition(|window| window == kind).unwrap();
    change(&mut bytes[place + 4..]);
    Movie::read(&bytes[..])
}

#[test]
fn a_plain_file_is_read_to_its_last_picture() {
    let movie = movie("vid_cfr_h264.mp4");
    assert_eq!((movie.ticks_per_s, movie.samples.len()), (10240, 30));
    assert_eq!(movie.h264_size(), Some(ImageSize { width: 128, height: 96 }));
    assert_eq!(movie.turn, [1, 0, 0, 1]);
    let mut shown: Vec<i64> = movie.samples.iter().map(|sample| sample.shown).collect();
    shown.sort_unstable();
    assert!(shown.windows(2).all(|pair| pair[1] - pair[0] == 1024));
    let bytes = file("vid_cfr_h264.mp4");
    let first = movie.samples[0];
    assert_eq!(
        movie.role(first, &bytes[first.place as usize..][..first.bytes as usize]),
        Role::Refresh
    );
}

#[test]
fn every_plain_sample_is_read_and_what_is_not_plain_is_left() {
    for name in [
        "vid_10bit_h264.mp4",
        "vid_60fps.mp4",
        "vid_audio_longer.mp4",
        "vid_bframes_opengop.mp4",
        "vid_faststart.mp4",
        "vid_fullrange.mp4",
        "vid_half_fps.mp4",
        "vid_long_10min_30fps.mp4",
        "vid_one_frame.mp4",
        "vid_rot180.mp4",
        "vid_rot90.mp4",
        "vid_two_frames.mp4",
        "vid_vfr.mp4",
        "vid_with_cover.mp4",
    ] {
        assert!(movie(name).h264_size().is_some(), "{name}");
    }
    for name in ["vid_hevc.mp4", "vid_av1.mp4", "vid_mjpeg.mov"] {
        assert_eq!(movie(name).h264_size(), None, "{name}");
    }
    for name in [
        "vid_truncated_tail.mp4",
        "vid_no_index.mp4",
        "vid_empty.mp4",
        "vid_text.mp4",
        "vid_h264.mkv",
    ] {
        assert_eq!(Movie::read(&file(name)[..]), None, "{name}");
    }
}

#[test]
fn tables_that_contradict_each_other_are_not_read() {
    let name = "vid_cfr_h264.mp4";
    assert!(changed(name, b"free", |_| {}).is_some());
    for (kind, place, why) in [
        (b"stsz", 11, "a sample more than there are times"),
        (b"stts", 11, "more times than samples"),
        (b"ctts", 11, "more offsets than samples"),
        (b"stco", 8, "a chunk beyond the end of the file"),
        (b"stsc", 15, "more samples in a chunk"),
        (b"stsd", 7, "two kinds of samples"),
        (b"elst", 7, "two edits"),
        (b"elst", 17, "an edit at half speed"),
        (b"elst", 12, "an edit that begins later"),
        (b"mvhd", 40 + 3, "a movie that is turned"),
        (b"elst", 10, "an edit that ends before the last picture"),
    ] {
        assert_eq!(changed(name, kind, |body| body[place] ^= 1), None, "{why}");
    }
    // each is in the file, all together are longer than it: they would share their bytes
    let overlapping = |body: &mut [u8]| {
        for size in body[12..][..30 * 4].chunks_exact_mut(4) {
            size.copy_from_slice(&1000_u32.to_be_bytes());
        }
    };
    assert!(file(name).len() < 30 * 1000);
    assert_eq!(changed(name, b"stsz", overlapping), None);
    assert_eq!(changed(name, b"avcC", |body| body[4] ^= 1).unwrap().h264_size(), None);
    // the container says 129 columns
    assert_eq!(changed(name, b"avc1", |body| body[25] ^= 1).unwrap().h264_size(), None);
}

#[test]
fn no_change_of_a_byte_and_no_end_breaks_the_reader() {
    let whole = file("vid_bframes_opengop.mp4");
    let index = whole.windows(4).position(|window| window == b"moov").unwrap();
    for place in 0..whole.len() - index {
        let mut bytes = whole.clone();
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            bytes[index + place] = value;
            if let Some(movie) = Movie::read(&bytes[..]) {
                for sample in &movie.samples {
                    let (from, to) = (sample.place, sample.place + u64::from(sample.bytes));
                    movie.role(*sample, &bytes[from as usize..to as usize]);
                }
            }
        }
        assert_eq!(Movie::read(&whole[..index + place]), None);
    }
}

#[test]
fn an_excerpt_read_back_has_its_samples_at_their_times() {
    for name in ["vid_bframes_opengop.mp4", "vid_vfr.mp4", "vid_cfr_h264.mp4"] {
        let (bytes, movie) = (file(name), movie(name));
        let mut excerpt = Excerpt::new(&movie);
        let chosen: Vec<Sample> = movie.samples.iter().step_by(3).copied().collect();
        let mut body = Vec::new();
        for sample in &chosen {
            body.extend(&bytes[sample.place as usize..][..sample.bytes as usize]);
            excerpt.push(*sample);
        }
        let made = [excerpt.head(), body, excerpt.index(&movie).unwrap()].concat();

        let read = Movie::read(&made[..]).unwrap();

        assert_eq!((read.ticks_per_s, read.h264_size()), (movie.ticks_per_s, movie.h264_size()));
        assert_eq!(read.samples.len(), chosen.len());
        assert_eq!(read.samples[0].place, Excerpt::FIRST_SAMPLE);
        for (read, given) in read.samples.iter().zip(&chosen) {
            assert_eq!((read.shown, read.is_key), (excerpt.stamp(*given), given.is_key));
            assert!(read.shown >= read.decoded);
            let (from, to) = (read.place as usize, given.place as usize);
            assert!(made[from..][..read.bytes as usize] == bytes[to..][..given.bytes as usize]);
        }
    }
}

#[test]
fn a_sample_is_what_all_its_units_are() {
    let unit = |first: u8, length: usize| {
        let body = vec![first; length];
        [&(length as u32).to_be_bytes()[..], &body].concat()
    };
    let (sets, reset, other, free) =
        (unit(0x67, 9), unit(0x65, 30), unit(0x41, 30), unit(0x01, 30));
    let message = unit(0x06, 5);
    let role = |units: &[&Vec<u8>]| {
        let bytes: Vec<u8> = units.iter().flat_map(|unit| unit.iter().copied()).collect();
        h264::role(&bytes)
    };
    assert_eq!(role(&[&sets, &reset, &reset]), Role::Refresh);
    assert_eq!(role(&[&message, &free, &free]), Role::Disposable);
    for units in [
        &[&sets, &other][..],
        &[&sets, &free],
        &[&reset, &other],
        &[&sets],
        &[&other, &free],
        &[&message],
        &[&reset, &vec![0, 0, 1]],
        &[&free, &vec![0, 0, 0, 0]],
        &[&vec![0, 0, 0, 9, 1]],
        &[],
    ] {
        assert_eq!(role(units), Role::Other, "{units:?}");
    }
    assert_eq!(h264::hevc_role(&unit(19 << 1, 9)), Role::Refresh);
    assert_eq!(h264::hevc_role(&unit(21 << 1, 9)), Role::Other);
}
