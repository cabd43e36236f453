//! Files damaged at random, the same way everywhere.

/// Numbers that look random and are the same everywhere.
pub struct Noise(pub u64);

impl Noise {
    /// A number from 0 to below the limit.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit.max(1) as u64) as usize
    }
}

/// Changes a few bytes, mostly near the beginning, where headers are; or cuts, doubles, moves parts.
pub fn damaged(bytes: &[u8], noise: &mut Noise) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..=noise.below(4) {
        let reach = if noise.below(2) == 0 { out.len().min(200) } else { out.len() };
        let at = noise.below(reach);
        let length = 1 + noise.below(16).min(out.len().saturating_sub(at + 1));
        match noise.below(6) {
            _ if out.is_empty() => return out,
            0 => out[at] ^= 1 << noise.below(8),
            1 => out[at] = [0, 0xff, 0x7f, 0x80][noise.below(4)],
            2 => {
                let end = (at + length).min(out.len());
                out[at..end].fill(noise.below(256) as u8);
            }
            3 => out.truncate(at),
            4 => {
                let part: Vec<u8> = out[at..].iter().take(length).copied().collect();
                out.splice(at..at, part);
            }
            _ => drop(out.drain(at..(at + length).min(out.len()))),
        }
    }
    out
}
