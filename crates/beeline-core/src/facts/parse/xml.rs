//! Bounded XML: refuses what topology files never contain before the tree is built.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use roxmltree::{Document, Node, ParsingOptions};

use super::{Input, ReadError};

/// Deepest nesting of elements. Real machines stay below 20.
const DEPTH_MAX: u32 = 64;
/// Attributes of one element.
const ATTRIBUTES_MAX: u32 = 64;
/// Elements, texts and comments of one file.
const NODES_MAX: u32 = 500_000;

/// A parsed file that knows its line numbers.
pub(super) struct Tree<'a> {
    pub(super) document: Document<'a>,
    newlines: Vec<usize>,
}

impl<'a> Tree<'a> {
    pub(super) fn parse(input: &Input<'a>) -> Result<Self, ReadError> {
        check_bounds(input)?;
        let options =
            ParsingOptions { allow_dtd: true, nodes_limit: NODES_MAX, ..ParsingOptions::default() };
        let document = Document::parse_with_options(input.text, options)
            .map_err(|error| ReadError::new(input, error.pos().row, broken(&error)))?;
        let newlines = input.text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i);
        Ok(Self { document, newlines: newlines.collect() })
    }

    /// Line of an element, from 1.
    pub(super) fn line(&self, node: &Node<'_, '_>) -> u32 {
        let before = self.newlines.partition_point(|at| *at < node.range().start);
        u32::try_from(before).unwrap_or(u32::MAX).saturating_add(1)
    }
}

fn broken(error: &roxmltree::Error) -> String {
    alloc::format!("broken XML: {error}")
}

/// Name of the first element, without parsing the file.
pub(super) fn root_name(head: &str) -> Option<&str> {
    let mut rest = head.trim_start();
    loop {
        rest = rest.strip_prefix('<')?;
        let end = match rest.as_bytes().first()? {
            b'?' => rest.find("?>")? + 2,
            b'!' if rest.starts_with("!--") => rest.find("-->")? + 3,
            // A document type may hold a subset in brackets.
            b'!' => match (rest.find('>')?, rest.find('[')) {
                (end, Some(subset)) if subset < end => {
                    let close = rest.get(subset..)?.find(']')? + subset;
                    close + rest.get(close..)?.find('>')? + 1
                }
                (end, _) => end + 1,
            },
            _ => {
                let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
                return rest.get(..end);
            }
        };
        rest = rest.get(end..)?.trim_start();
    }
}

/// One linear pass over tags: entity declarations, depth and attribute counts.
fn check_bounds(input: &Input<'_>) -> Result<(), ReadError> {
    let bytes = input.text.as_bytes();
    let (mut line, mut depth, mut at) = (1u32, 0u32, 0usize);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'\n' => line = line.saturating_add(1),
            b'<' => {
                let rest = bytes.get(at..).unwrap_or_default();
                if rest.starts_with(b"<!ENTITY") {
                    let message = "declares an entity, which topology files never do".to_string();
                    return Err(ReadError::new(input, line, message));
                }
                if rest.starts_with(b"<!--") {
                    let end =
                        input.text.get(at..).and_then(|t| t.find("-->")).unwrap_or(rest.len());
                    let skipped = rest.get(..end).unwrap_or_default();
                    line = line.saturating_add(count_newlines(skipped));
                    at += end;
                    continue;
                }
                let (attributes, closing) = tag_shape(rest);
                if attributes > ATTRIBUTES_MAX {
                    let message =
                        alloc::format!("element with more than {ATTRIBUTES_MAX} attributes");
                    return Err(ReadError::new(input, line, message));
                }
                depth = match (rest.get(1), closing) {
                    (Some(b'/'), _) => depth.saturating_sub(1),
                    (Some(b'?' | b'!'), _) | (_, true) => depth,
                    _ => depth + 1,
                };
                if depth > DEPTH_MAX {
                    let message = alloc::format!("elements nested deeper than {DEPTH_MAX}");
                    return Err(ReadError::new(input, line, message));
                }
            }
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

/// Number of attributes of the tag that `rest` starts with, and whether it closes itself.
fn tag_shape(rest: &[u8]) -> (u32, bool) {
    let (mut quote, mut attributes, mut previous) = (None, 0u32, b'<');
    for byte in rest {
        match (quote, byte) {
            (None, b'"' | b'\'') => quote = Some(*byte),
            (Some(open), byte) if open == *byte => quote = None,
            (None, b'=') => attributes += 1,
            (None, b'>') => return (attributes, previous == b'/'),
            _ => {}
        }
        if attributes > ATTRIBUTES_MAX {
            break;
        }
        previous = *byte;
    }
    (attributes, false)
}

fn count_newlines(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.iter().filter(|b| **b == b'\n').count()).unwrap_or(u32::MAX)
}
