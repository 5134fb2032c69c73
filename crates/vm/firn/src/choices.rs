//! Options whose value is one of a few words. Help lists the words with their meanings, and
//! completions offer them.

use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// A word, and its meaning for help.
pub type Choice = (&'static str, &'static str);

/// Parses one of these words into the value of that name.
pub fn parse_choice<T>(words: &'static [Choice]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: std::error::Error + Send + Sync + 'static> + Clone + Send + Sync + 'static,
{
    accept_words(words).try_map(|word| word.parse::<T>())
}

/// Accepts these words.
pub fn accept_words(words: &'static [Choice]) -> PossibleValuesParser {
    words.iter().map(|(word, meaning)| PossibleValue::new(*word).help(*meaning)).into()
}
