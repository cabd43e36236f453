//! Resizers of the sizes seen last: screenshots of one screen and clips of one camera share theirs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use gateway_media::ImageSize;
use gateway_media::resize::Resizer;

use super::MediaLoader;

/// Resizers kept; a photo's holds some hundred kilobytes of weights.
const KEPT: usize = 16;
/// Bytes of all that are kept: a panorama's alone may hold tens of millions.
const KEPT_BYTES: usize = 4 << 20;

/// A few resizers, the last used ones in front; copies share them.
#[derive(Clone, Debug, Default)]
pub struct Resizers(Arc<Mutex<VecDeque<Arc<Resizer>>>>);

impl Resizers {
    /// The one for these sizes, made if it is not there: up to some milliseconds of work.
    pub fn get(&self, source: ImageSize, target: ImageSize) -> Arc<Resizer> {
        if let Some(known) = self.find(source, target) {
            return known;
        }
        // not under the lock; two who miss at once both make one
        let made = Arc::new(Resizer::new(source, target));
        if made.bytes() > KEPT_BYTES {
            return made;
        }
        // nothing panics while it is held
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_front(Arc::clone(&made));
        kept.truncate(KEPT);
        while kept.iter().map(|resizer| resizer.bytes()).sum::<usize>() > KEPT_BYTES {
            kept.pop_back();
        }
        made
    }

    fn find(&self, source: ImageSize, target: ImageSize) -> Option<Arc<Resizer>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |kept: &Arc<Resizer>| (kept.source(), kept.target()) == (source, target);
        let place = kept.iter().position(is_it)?;
        let found = kept.remove(place)?;
        kept.push_front(Arc::clone(&found));
        Some(found)
    }
}

impl MediaLoader {
    /// From frames of one size to those of another.
    pub(crate) fn resizer(&self, source: ImageSize, target: ImageSize) -> Arc<Resizer> {
        self.resizers.get(source, target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_sizes_share_one_and_the_longest_unused_leaves() {
        let resizers = Resizers::default();
        let size = |width| ImageSize { width, height: 40 };
        let target = ImageSize { width: 28, height: 28 };
        let first = resizers.get(size(30), target);
        for width in 31..31 + KEPT as u32 - 1 {
            resizers.get(size(width), target);
        }
        assert!(Arc::ptr_eq(&first, &resizers.get(size(30), target)), "used again: in front");
        assert_eq!((first.source(), first.target()), (size(30), target));
        resizers.get(size(90), target);
        assert!(resizers.find(size(31), target).is_none());
        assert!(Arc::ptr_eq(&first, &resizers.get(size(30), target)));
        assert!(resizers.find(target, size(30)).is_none());
    }

    #[test]
    fn tables_of_panoramas_stay_within_the_bytes_set_aside() {
        let resizers = Resizers::default();
        let target = ImageSize { width: 2016, height: 28 };
        for width in 0..KEPT as u32 {
            let source = ImageSize { width: 20_000 + width, height: 300 };
            resizers.get(source, target);
            let kept = resizers.0.lock().unwrap();
            let bytes: usize = kept.iter().map(|resizer| resizer.bytes()).sum();
            assert!(bytes <= KEPT_BYTES, "{bytes} bytes of {} resizers", kept.len());
            assert_eq!(kept[0].source(), source, "the last one is kept");
        }
        let huge = ImageSize { width: 500_000, height: 28 };
        let made = resizers.get(huge, target);
        assert!(made.bytes() > KEPT_BYTES);
        assert!(resizers.find(huge, target).is_none(), "one that would push out all others");
        assert!(!resizers.0.lock().unwrap().is_empty());
    }
}
