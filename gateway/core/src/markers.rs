//! Finds fixed strings in a stream of text, and how much of its end may still become one.

/// One state per distinct prefix of the patterns; state 0 is the empty prefix.
#[derive(Clone, Debug)]
pub struct MarkerSet {
    states: Vec<State>,
    /// A bit for each byte that begins a pattern: most text has none of them.
    first: [u64; 4],
}

#[derive(Clone, Debug)]
struct State {
    /// Next state by byte, for bytes that lengthen this prefix; ascending.
    next: Vec<(u8, u32)>,
    /// The longest proper suffix of this prefix that is a prefix too.
    fallback: u32,
    /// Bytes of the prefix.
    depth: u32,
    /// The longest pattern that ends here: its number and its length.
    found: Option<(u32, u32)>,
}

/// Where a scan stands; carried from one piece of text to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position(u32);

/// The end of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which pattern.
    pub pattern: usize,
    /// Its length in bytes.
    pub length: usize,
    /// Bytes of the piece up to and with its end.
    pub end: usize,
}

impl MarkerSet {
    /// Indexes the patterns; empty ones are left out.
    pub fn new<T: AsRef<str>>(patterns: &[T]) -> Self {
        let root = State { next: Vec::new(), fallback: 0, depth: 0, found: None };
        let mut set = Self { states: vec![root], first: [0; 4] };
        for (number, pattern) in patterns.iter().enumerate() {
            set.insert(pattern.as_ref().as_bytes(), number);
        }
        set.link();
        set
    }

    fn insert(&mut self, pattern: &[u8], number: usize) {
        if pattern.is_empty() {
            return;
        }
        let first = pattern[0];
        self.first[usize::from(first / 64)] |= 1 << (first % 64);
        let mut at = 0;
        for &byte in pattern {
            at = match self.states[at as usize].goto(byte) {
                Some(next) => next,
                None => {
                    let new = index(self.states.len());
                    let depth = self.states[at as usize].depth + 1;
                    self.states.push(State { next: Vec::new(), fallback: 0, depth, found: None });
                    let next = &mut self.states[at as usize].next;
                    let place = next.partition_point(|&(other, _)| other < byte);
                    next.insert(place, (byte, new));
                    new
                }
            };
        }
        let found = &mut self.states[at as usize].found;
        // of equal patterns the first counts
        found.get_or_insert((index(number), index(pattern.len())));
    }

    /// Sets fallbacks, shortest prefixes first.
    fn link(&mut self) {
        let mut queue = std::collections::VecDeque::from([0u32]);
        while let Some(at) = queue.pop_front() {
            for (byte, next) in self.states[at as usize].next.clone() {
                let fallback =
                    if at == 0 { 0 } else { self.step(self.states[at as usize].fallback, byte) };
                let inherited = self.states[fallback as usize].found;
                let state = &mut self.states[next as usize];
                state.fallback = fallback;
                state.found = state.found.or(inherited);
                queue.push_back(next);
            }
        }
    }

    fn step(&self, mut at: u32, byte: u8) -> u32 {
        loop {
            if let Some(next) = self.states[at as usize].goto(byte) {
                return next;
            }
            if at == 0 {
                return 0;
            }
            at = self.states[at as usize].fallback;
        }
    }

    /// Reads `text` on from `position` up to the first end of a pattern, which resets the
    /// position; `None` if the text ends before one.
    pub fn scan(&self, position: &mut Position, text: &str) -> Option<Found> {
        let mut at = position.0;
        for (offset, &byte) in text.as_bytes().iter().enumerate() {
            if at == 0 && self.first[usize::from(byte / 64)] >> (byte % 64) & 1 == 0 {
                continue;
            }
            at = self.step(at, byte);
            if let Some((pattern, length)) = self.states[at as usize].found {
                *position = Position::default();
                return Some(Found {
                    pattern: pattern as usize,
                    length: length as usize,
                    end: offset + 1,
                });
            }
        }
        *position = Position(at);
        None
    }

    /// Bytes before `position` that may still become a pattern.
    pub fn held(&self, position: Position) -> usize {
        self.states[position.0 as usize].depth as usize
    }
}

impl State {
    fn goto(&self, byte: u8) -> Option<u32> {
        match self.next.as_slice() {
            [] => None,
            [(only, next)] => (*only == byte).then_some(*next),
            many => many.binary_search_by_key(&byte, |&(byte, _)| byte).ok().map(|at| many[at].1),
        }
    }
}

fn index(value: usize) -> u32 {
    u32::try_from(value).expect("invariant: patterns are short")
}

#[cfg(test)]
mod tests;
