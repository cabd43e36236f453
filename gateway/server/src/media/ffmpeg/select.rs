//! Frame numbers as an expression for FFmpeg's `select` filter.

/// Numbers compared one by one at a leaf of the tree.
const LEAF_FRAMES: usize = 8;

/// An expression that is true for exactly these frame numbers (ascending, not empty), counted by
/// the filter from the beginning.
///
/// A plain sum of comparisons is refused by FFmpeg past some hundred terms and costs every term
/// for every frame; a balanced tree has neither trouble.
pub(super) fn by_number(frames: &[u64]) -> String {
    let mut text = String::new();
    write_numbers(frames, &mut text);
    text
}

fn write_numbers(frames: &[u64], text: &mut String) {
    let (Some(first), Some(last)) = (frames.first(), frames.last()) else {
        text.push('0');
        return;
    };
    if last - first + 1 == frames.len() as u64 {
        text.push_str(&format!("between(n,{first},{last})"));
    } else if frames.len() <= LEAF_FRAMES {
        let terms: Vec<_> = frames.iter().map(|frame| format!("eq(n,{frame})")).collect();
        text.push_str(&terms.join("+"));
    } else {
        let (left, right) = frames.split_at(frames.len() / 2);
        text.push_str(&format!("if(lt(n,{}),", right[0]));
        write_numbers(left, text);
        text.push(',');
        write_numbers(right, text);
        text.push(')');
    }
}

/// An expression that is true for exactly the frames with these time stamps (ascending, not empty),
/// each only if all before it were there: a missing one leaves an end too early, which is seen,
/// and never another frame in its place, which is not.
pub(super) fn by_stamp(stamps: &[i64]) -> String {
    let mut text = String::new();
    write_stamps(stamps, 0, &mut text);
    text
}

fn write_stamps(stamps: &[i64], first: usize, text: &mut String) {
    if stamps.len() <= LEAF_FRAMES {
        let term = |(index, stamp)| format!("eq(pts,{stamp})*eq(selected_n,{index})");
        let terms: Vec<_> = (first..).zip(stamps).map(term).collect();
        text.push_str(&terms.join("+"));
    } else {
        let middle = stamps.len() / 2;
        let (left, right) = stamps.split_at(middle);
        text.push_str(&format!("if(lt(pts,{}),", right[0]));
        write_stamps(left, first, text);
        text.push(',');
        write_stamps(right, first + middle, text);
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
            let text = by_number(&frames);
            for n in 0..=frames[frames.len() - 1] + 2 {
                assert_eq!(holds(&text, n), frames.contains(&n), "{n} in {text}");
            }
        }
    }

    #[test]
    fn each_stamp_has_its_place_in_line_on_every_branch() {
        assert_eq!(
            by_stamp(&[-512, 0]),
            "eq(pts,-512)*eq(selected_n,0)+eq(pts,0)*eq(selected_n,1)"
        );
        let stamps: Vec<i64> = (0..100).map(|frame| frame * 512 - 1024).collect();
        let text = by_stamp(&stamps);
        for (index, stamp) in stamps.iter().enumerate() {
            let term = format!("eq(pts,{stamp})*eq(selected_n,{index})");
            assert_eq!(text.matches(&term).count(), 1, "{term}");
        }
        assert!(text.starts_with("if(lt(pts,24576),if("), "{text}");
    }

    #[test]
    fn a_long_list_stays_shallow() {
        let frames: Vec<u64> = (0..768).map(|index| index * 30).collect();
        let mut depth = 0_usize;
        let mut deepest = 0;
        for letter in by_number(&frames).chars() {
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
