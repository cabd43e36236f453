//! Who holds which page: a bounded map from page keys to sets of seats.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

/// Most workers one gateway follows.
pub const MAX_SEATS: usize = 1024;
const WORDS: usize = MAX_SEATS / 64;

/// A set of seats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seats([u64; WORDS]);

impl Seats {
    const NONE: Self = Self([0; WORDS]);

    fn of(seat: usize) -> Self {
        let mut seats = Self::NONE;
        seats.insert(seat);
        seats
    }

    fn insert(&mut self, seat: usize) {
        self.0[seat / 64] |= 1 << (seat % 64);
    }

    fn remove(&mut self, seat: usize) {
        self.0[seat / 64] &= !(1 << (seat % 64));
    }

    fn extend(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(word, more)| *word |= more);
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// What both hold, and what only this one holds.
    fn split(&self, other: &Self) -> (Self, Self) {
        let (mut both, mut rest) = (Self::NONE, Self::NONE);
        for place in 0..WORDS {
            both.0[place] = self.0[place] & other.0[place];
            rest.0[place] = self.0[place] & !other.0[place];
        }
        (both, rest)
    }

    fn for_each(&self, mut visit: impl FnMut(usize)) {
        for (place, word) in self.0.iter().enumerate() {
            let mut left = *word;
            while left != 0 {
                visit(place * 64 + left.trailing_zeros() as usize);
                left &= left - 1;
            }
        }
    }
}

/// Most pages are held by one worker only; the few that all share are worth a whole set.
#[derive(Clone, Debug)]
enum Holders {
    One(u16),
    Many(Box<Seats>),
}

/// Keys are cut from a cryptographic hash: they need no second one.
#[derive(Clone, Copy, Debug, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 << 8) | u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

type ByKey<T> = HashMap<u64, T, BuildHasherDefault<KeyHasher>>;

/// Pages by key and by seat. Entries are counted: a page noted twice is forgotten twice.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    holders: ByKey<Holders>,
    by_seat: Vec<ByKey<u32>>,
    max_pages: usize,
    num_pages: usize,
}

impl PrefixIndex {
    /// Holds at most `max_pages` entries of all seats together; what comes later is not noted.
    pub fn new(max_pages: usize) -> Self {
        Self { max_pages, ..Self::default() }
    }

    /// Entries of all seats: a page that two seats hold counts twice.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Entries of one seat.
    pub fn pages_of(&self, seat: usize) -> usize {
        self.by_seat.get(seat).map_or(0, HashMap::len)
    }

    /// Notes that a seat holds a page; false if there is no room left to note it.
    pub fn add(&mut self, seat: usize, key: u64) -> bool {
        self.note(seat, key, 1)
    }

    /// The same for a page that is to be noted only once; false if it was, too.
    pub fn add_new(&mut self, seat: usize, key: u64) -> bool {
        self.note(seat, key, 0)
    }

    fn note(&mut self, seat: usize, key: u64, again: u32) -> bool {
        if seat >= MAX_SEATS {
            return false;
        }
        if self.by_seat.len() <= seat {
            self.by_seat.resize_with(seat + 1, ByKey::default);
        }
        match self.by_seat[seat].entry(key) {
            Entry::Occupied(mut count) => {
                *count.get_mut() += again;
                return again > 0;
            }
            Entry::Vacant(_) if self.num_pages >= self.max_pages => return false,
            Entry::Vacant(count) => {
                count.insert(1);
            }
        }
        self.num_pages += 1;
        match self.holders.entry(key) {
            Entry::Vacant(none) => {
                none.insert(Holders::One(seat as u16));
            }
            Entry::Occupied(mut held) => match held.get_mut() {
                Holders::One(other) => {
                    let mut seats = Seats::of(usize::from(*other));
                    seats.insert(seat);
                    held.insert(Holders::Many(Box::new(seats)));
                }
                Holders::Many(seats) => seats.insert(seat),
            },
        }
        true
    }

    /// Whether a seat is noted for a page.
    pub fn holds(&self, seat: usize, key: u64) -> bool {
        self.by_seat.get(seat).is_some_and(|pages| pages.contains_key(&key))
    }

    /// Takes one note back; one that was never made changes nothing.
    pub fn remove(&mut self, seat: usize, key: u64) {
        let Some(pages) = self.by_seat.get_mut(seat) else { return };
        let Entry::Occupied(mut count) = pages.entry(key) else { return };
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
            self.num_pages -= 1;
            self.drop_holder(seat, key);
        }
    }

    /// Forgets all pages of a seat.
    pub fn clear(&mut self, seat: usize) {
        let Some(pages) = self.by_seat.get_mut(seat) else { return };
        let pages = std::mem::take(pages);
        self.num_pages -= pages.len();
        for key in pages.into_keys() {
            self.drop_holder(seat, key);
        }
    }

    fn drop_holder(&mut self, seat: usize, key: u64) {
        let Entry::Occupied(mut held) = self.holders.entry(key) else { return };
        let is_empty = match held.get_mut() {
            Holders::One(_) => true,
            Holders::Many(seats) => {
                seats.remove(seat);
                seats.is_empty()
            }
        };
        if is_empty {
            held.remove();
        }
    }

    /// Raises, for every seat that holds the head of a chain by any of the indices, its entry in
    /// `pages` to the number of pages it holds from there on.
    ///
    /// A page without its parents is useless to a worker, and workers evict from the tail: a seat
    /// that holds a page is taken to hold all before it. So a chain of a million tokens costs a
    /// few look-ups for each length that differs.
    pub fn match_chain(indices: &[&Self], chain: &[u64], pages: &mut [u32]) {
        let Some(first) = chain.first() else { return };
        let seats = seats_of(indices, *first);
        if seats.is_empty() {
            return;
        }
        let last = chain.len() - 1;
        let (whole, rest) = seats.split(&seats_of(indices, chain[last]));
        raise(&whole, chain.len(), pages);
        bisect(indices, chain, (0, last), (&rest, pages));
    }

    fn add_seats_of(&self, key: u64, seats: &mut Seats) {
        match self.holders.get(&key) {
            None => {}
            Some(Holders::One(seat)) => seats.insert(usize::from(*seat)),
            Some(Holders::Many(many)) => seats.extend(many),
        }
    }
}

/// The seats hold the page at `range.0` and not the one at `range.1`.
fn bisect(
    indices: &[&PrefixIndex],
    chain: &[u64],
    range: (usize, usize),
    (seats, pages): (&Seats, &mut [u32]),
) {
    let (low, high) = range;
    if seats.is_empty() {
        return;
    }
    if high - low <= 1 {
        raise(seats, low + 1, pages);
        return;
    }
    let middle = low.midpoint(high);
    let (hold, lack) = seats.split(&seats_of(indices, chain[middle]));
    bisect(indices, chain, (middle, high), (&hold, &mut *pages));
    bisect(indices, chain, (low, middle), (&lack, pages));
}

fn seats_of(indices: &[&PrefixIndex], key: u64) -> Seats {
    let mut seats = Seats::NONE;
    indices.iter().for_each(|index| index.add_seats_of(key, &mut seats));
    seats
}

fn raise(seats: &Seats, length: usize, pages: &mut [u32]) {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    seats.for_each(|seat| {
        if let Some(entry) = pages.get_mut(seat) {
            *entry = (*entry).max(length);
        }
    });
}
