//! Any bytes as an MP4 file: samples that are told of lie in it, and an excerpt of all of them is
//! read back as the same.
#![no_main]

use gateway_media::mp4::{Excerpt, Movie};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some(movie) = Movie::read(bytes) else { return };
    let mut excerpt = Excerpt::new(&movie);
    let mut body = Vec::new();
    for sample in &movie.samples {
        let begin = sample.place as usize;
        let coded = &bytes[begin..begin + sample.bytes as usize];
        movie.role(*sample, coded);
        // many samples may share the same bytes
        if body.len() > 1 << 24 {
            return;
        }
        body.extend(coded);
        excerpt.push(*sample);
    }
    let Some(index) = excerpt.index(&movie) else { return };
    let made = [excerpt.head(), body, index].concat();
    let read = Movie::read(&made[..]).expect("an excerpt is a plain file");
    assert_eq!(read.samples.len(), movie.samples.len());
    for (read, given) in read.samples.iter().zip(&movie.samples) {
        assert_eq!((read.shown, read.is_key), (excerpt.stamp(*given), given.is_key));
    }
});
