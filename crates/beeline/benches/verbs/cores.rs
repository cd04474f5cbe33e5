//! The two cores that the threads of a ping stay on.

use std::sync::OnceLock;

use beeline_sys::thread::{allowed_cpus, pin_to};

use crate::Result;

static CHOSEN: OnceLock<[usize; 2]> = OnceLock::new();

/// Chooses `wanted`, or two that are not threads of one core.
pub(crate) fn choose(wanted: Option<[usize; 2]>) -> Result<()> {
    let cpus = allowed_cpus()?;
    let two = match (wanted, cpus.as_slice()) {
        (Some(two), _) => Some(two),
        (None, [first, rest @ ..]) => {
            let siblings = siblings(*first);
            rest.iter().find(|cpu| !siblings.contains(cpu)).map(|other| [*first, *other])
        }
        (None, []) => None,
    };
    // A machine with one core has no two.
    if let Some(two) = two {
        let _ = CHOSEN.set(two);
    }
    Ok(())
}

pub(crate) fn text() -> String {
    match CHOSEN.get() {
        Some([one, other]) => format!("cores {one} and {other}"),
        None => "threads of one core".to_owned(),
    }
}

/// Confines the calling thread to the first core or the second, until the answer is dropped.
pub(crate) fn stay(second: bool) -> Stay {
    let before = allowed_cpus().unwrap_or_default();
    if let Some([one, other]) = CHOSEN.get() {
        let _ = pin_to(&[if second { *other } else { *one }]);
    }
    Stay { before }
}

pub(crate) struct Stay {
    before: Vec<usize>,
}

impl Drop for Stay {
    fn drop(&mut self) {
        let _ = pin_to(&self.before);
    }
}

/// The threads of a core, as `0-1` or `0,16`.
fn siblings(cpu: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut all = vec![cpu];
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse(), last.parse::<usize>()) {
            all.extend(first..=last);
        }
    }
    all
}
