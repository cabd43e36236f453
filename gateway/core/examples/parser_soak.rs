//! The fuzz target of the output parser on a stable compiler, without coverage: random bytes, and
//! mutations of those before them, for so many seconds.
//!
//! `cargo run --release -p gateway-core --example parser_soak -- [SECONDS] [SEED]`
#![allow(clippy::print_stdout, missing_docs)]

#[path = "../../fuzz/output_parser_body.rs"]
mod body;

use std::time::{Duration, Instant};

/// Inputs that mutations start from.
const KEPT: usize = 512;
const MOST_BYTES: usize = 400;

/// Numbers that are random enough, and the same for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// Structure three times in four: bytes below 32 stand for whole pieces of it.
    fn byte(&mut self) -> u8 {
        match self.below(4) {
            0 => self.next() as u8,
            _ => self.below(32) as u8,
        }
    }
}

fn mutate(input: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    for _ in 0..=random.below(4) {
        let at = random.below(input.len() + 1);
        match random.below(5) {
            0 => input.insert(at, random.byte()),
            1 if at < input.len() => input[at] = random.byte(),
            2 if at < input.len() => {
                input.remove(at);
            }
            3 => {
                let end = (at + random.below(12)).min(input.len());
                let again = input[at..end].to_vec();
                input.splice(at..at, again);
            }
            _ => {
                input.truncate(at);
                input.extend_from_slice(&other[random.below(other.len() + 1)..]);
            }
        }
    }
    input.truncate(MOST_BYTES);
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| {
        arguments.next().and_then(|text| text.parse::<u64>().ok()).unwrap_or(default)
    };
    let (seconds, seed) = (number(600), number(1));
    let mut random = Random(seed.max(1));
    let mut kept: Vec<Vec<u8>> = Vec::new();
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut inputs, mut bytes) = (0_u64, 0_u64);
    let mut slowest = Duration::ZERO;
    while Instant::now() < end {
        let mut input = match kept.is_empty() || random.below(8) == 0 {
            true => (0..random.below(80)).map(|_| random.byte()).collect(),
            false => kept[random.below(kept.len())].clone(),
        };
        if !kept.is_empty() {
            let place = random.below(kept.len());
            mutate(&mut input, &kept[place], &mut random);
        }
        let begin = Instant::now();
        if std::panic::catch_unwind(|| body::check(&input)).is_err() {
            println!("found by {input:?}");
            std::process::exit(1);
        }
        slowest = slowest.max(begin.elapsed());
        inputs += 1;
        bytes += input.len() as u64;
        match kept.len() < KEPT {
            true => kept.push(input),
            false => {
                let place = random.below(KEPT);
                kept[place] = input;
            }
        }
    }
    println!("{inputs} inputs, {bytes} bytes, no find; the slowest took {slowest:?}");
}
