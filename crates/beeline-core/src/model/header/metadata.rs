//! The free-form part of a header.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::HeaderError;

/// What a file says about itself: strings by string, ordered by key.
///
/// A sorted list rather than a tree: a hostile header holds millions of tiny entries, and a list
/// bounds their memory to a small multiple of the header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata(Vec<(Box<str>, Box<str>)>);

impl Metadata {
    /// Orders the entries; refuses a key that stands twice.
    pub(super) fn new(mut entries: Vec<(Box<str>, Box<str>)>) -> Result<Self, HeaderError> {
        entries.sort();
        let twice = entries.windows(2).find_map(|pair| match pair {
            [(a, _), (b, _)] if a == b => Some(a),
            _ => None,
        });
        match twice {
            Some(key) => Err(HeaderError::DuplicateMetadata { key: key.clone() }),
            None => Ok(Self(entries)),
        }
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&str> {
        let found = self.0.binary_search_by(|(known, _)| (**known).cmp(key));
        self.0.get(found.ok()?).map(|(_, value)| &**value)
    }

    /// All entries, ordered by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    /// Number of entries.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no entry.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
