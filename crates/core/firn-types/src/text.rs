//! Escaping of untrusted text, so that a terminal shows it and does not obey it.
//!
//! Images, guests, hypervisors and other hosts supply names and messages that Firn prints. A
//! control character in them moves the cursor or erases earlier output; a bidirectional override
//! shows a line in another order. Firn prints such characters as `\u{1b}`.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes every character that a terminal does not show as itself. The result is one line.
pub fn make_printable(text: &str) -> Cow<'_, str> {
    escape_unless(text, is_shown)
}

/// The same, but line feeds and tabs stay.
pub fn make_printable_lines(text: &str) -> Cow<'_, str> {
    escape_unless(text, |it| is_shown(it) || matches!(it, '\n' | '\t'))
}

fn escape_unless(text: &str, is_kept: impl Fn(char) -> bool) -> Cow<'_, str> {
    if text.chars().all(&is_kept) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for it in text.chars() {
        match is_kept(it) {
            true => out.push(it),
            // Writing to a string does not fail.
            false => drop(write!(out, "\\u{{{:x}}}", u32::from(it))),
        }
    }
    Cow::Owned(out)
}

/// Whether a terminal shows a character as itself, at its position in the text.
pub fn is_shown(it: char) -> bool {
    !it.is_control() && !is_invisible(it)
}

/// Whether a character has no shape of its own: directions, line separators, joiners, tags.
fn is_invisible(it: char) -> bool {
    matches!(it,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_text_is_unchanged() {
        for text in ["", "web-1.firn", "größer 日本 🦀", "a\\u{1b}"] {
            assert!(matches!(make_printable(text), Cow::Borrowed(same) if same == text));
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(make_printable("a\u{1b}[2Kb\r\n"), "a\\u{1b}[2Kb\\u{d}\\u{a}");
        assert_eq!(make_printable("\u{9b}1m \u{7f} \u{202e}x"), "\\u{9b}1m \\u{7f} \\u{202e}x");
        assert_eq!(make_printable_lines("a\n\tb\r"), "a\n\tb\\u{d}");
    }
}
