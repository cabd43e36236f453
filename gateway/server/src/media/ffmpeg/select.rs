//! Frame numbers as an expression for FFmpeg's `select` filter.

/// Numbers compared one by one at a leaf of the tree.
const LEAF_FRAMES: usize = 8;

/// What the filter compares.
pub(super) enum Variable<'a> {
    /// The number of the frame, counted by the filter.
    Number,
    /// The time stamp of the frame: `[0]` is that of frame 0.
    Stamp(&'a [i64]),
}

impl Variable<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::Number => "n",
            Self::Stamp(_) => "pts",
        }
    }

    fn of(&self, frame: u64) -> i64 {
        match self {
            Self::Number => frame as i64,
            Self::Stamp(stamps) => stamps[frame as usize],
        }
    }
}

/// An expression that is true for exactly these frame numbers (ascending, not empty).
///
/// A plain sum of comparisons is refused by FFmpeg past some hundred terms and costs every term
/// for every frame; a balanced tree has neither trouble.
pub(super) fn expression(frames: &[u64], variable: &Variable<'_>) -> String {
    let mut text = String::new();
    write_tree(frames, variable, &mut text);
    text
}

fn write_tree(frames: &[u64], variable: &Variable<'_>, text: &mut String) {
    let (Some(first), Some(last)) = (frames.first(), frames.last()) else {
        text.push('0');
        return;
    };
    let name = variable.name();
    if last - first + 1 == frames.len() as u64 {
        let (first, last) = (variable.of(*first), variable.of(*last));
        text.push_str(&format!("between({name},{first},{last})"));
    } else if frames.len() <= LEAF_FRAMES {
        let term = |frame: &u64| format!("eq({name},{})", variable.of(*frame));
        let terms: Vec<_> = frames.iter().map(term).collect();
        text.push_str(&terms.join("+"));
    } else {
        let (left, right) = frames.split_at(frames.len() / 2);
        text.push_str(&format!("if(lt({name},{}),", variable.of(right[0])));
        write_tree(left, variable, text);
        text.push(',');
        write_tree(right, variable, text);
        text.push(')');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What FFmpeg computes, for the few functions we use.
    fn holds(expression: &str, n: u64) -> bool {
        let (value, rest) = sum(expression, n);
        assert_eq!(rest, "", "left over in {expression}");
        value
    }

    fn sum(text: &str, n: u64) -> (bool, &str) {
        let (mut value, mut rest) = term(text, n);
        while let Some(more) = rest.strip_prefix('+') {
            let (next, after) = term(more, n);
            value |= next;
            rest = after;
        }
        (value, rest)
    }

    fn term(text: &str, n: u64) -> (bool, &str) {
        let number = |text: &str| text.parse::<u64>().unwrap();
        if let Some(rest) = text.strip_prefix("if(lt(n,") {
            let (limit, rest) = rest.split_once("),").unwrap();
            let (left, rest) = sum(rest, n);
            let (right, rest) = sum(rest.strip_prefix(',').unwrap(), n);
            return (if n < number(limit) { left } else { right }, rest.strip_prefix(')').unwrap());
        }
        let (call, rest) = text.split_once(')').unwrap();
        if let Some(one) = call.strip_prefix("eq(n,") {
            return (n == number(one), rest);
        }
        let (first, last) = call.strip_prefix("between(n,").unwrap().split_once(',').unwrap();
        ((number(first)..=number(last)).contains(&n), rest)
    }

    #[test]
    fn an_expression_is_true_for_its_frames_and_no_other() {
        let regular: Vec<u64> = (0..768).map(|index| index * 30).collect();
        let mixed: Vec<u64> = (0..400).map(|index| index * index / 7 + index).collect();
        for frames in [vec![0], vec![5], (3..90).collect(), vec![0, 2, 4, 29], regular, mixed] {
            let text = expression(&frames, &Variable::Number);
            for n in 0..=frames[frames.len() - 1] + 2 {
                assert_eq!(holds(&text, n), frames.contains(&n), "{n} in {text}");
            }
        }
    }

    #[test]
    fn stamps_stand_in_for_numbers() {
        let stamps: Vec<i64> = (0..100).map(|frame| frame * 512 - 1024).collect();
        let frames: Vec<u64> = (0..100).filter(|frame| frame % 3 != 1).collect();
        let by_stamp = expression(&frames, &Variable::Stamp(&stamps));
        assert!(by_stamp.contains("eq(pts,-1024)") && !by_stamp.contains("(n,"), "{by_stamp}");
        let run = expression(&[4, 5, 6], &Variable::Stamp(&stamps));
        assert_eq!(run, "between(pts,1024,2048)");
    }

    #[test]
    fn a_long_list_stays_shallow() {
        let frames: Vec<u64> = (0..768).map(|index| index * 30).collect();
        let mut depth = 0_usize;
        let mut deepest = 0;
        for letter in expression(&frames, &Variable::Number).chars() {
            match letter {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            deepest = deepest.max(depth);
        }
        assert!(deepest < 16, "{deepest}");
    }
}
