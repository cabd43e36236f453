//! Resizers of the sizes seen last: screenshots of one screen and clips of one camera share theirs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use gateway_media::ImageSize;
use gateway_media::resize::Resizer;

/// Resizers kept; each holds some hundred kilobytes of weights at most.
const KEPT: usize = 16;

/// A few resizers, the last used ones in front.
#[derive(Debug, Default)]
pub struct Resizers(Mutex<VecDeque<Arc<Resizer>>>);

impl Resizers {
    /// The one for these sizes, made if it is not there.
    pub fn get(&self, source: ImageSize, target: ImageSize) -> Arc<Resizer> {
        if let Some(known) = self.find(source, target) {
            return known;
        }
        // not under the lock; two who miss at once both make one
        let made = Arc::new(Resizer::new(source, target));
        // nothing panics while it is held
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_front(Arc::clone(&made));
        kept.truncate(KEPT);
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
}
