//! What the environment asks for.

use std::env::var;

pub(crate) struct Settings {
    pub(crate) devices: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) version: i32,
    pub(crate) init: i32,
    pub(crate) proc: Proc,
    pub(crate) hide: Vec<String>,
    pub(crate) later: Vec<String>,
    pub(crate) lacks: Vec<String>,
    pub(crate) mig: bool,
    pub(crate) atomics: bool,
    pub(crate) reuse: bool,
    pub(crate) addresses: bool,
    pub(crate) lose_after_copies: Option<u64>,
    pub(crate) lost: i32,
    pub(crate) visible: Option<Vec<String>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proc {
    V2,
    V1,
    None,
}

impl Settings {
    pub(crate) fn from_env() -> Self {
        Self {
            devices: number("DEVICES").unwrap_or(1).clamp(1, 16) as u32,
            memory_bytes: number("MEMORY").unwrap_or(1 << 30),
            version: number("VERSION").unwrap_or(13_000) as i32,
            init: number("INIT").unwrap_or(0) as i32,
            proc: match text("PROC").as_deref() {
                Some("none") => Proc::None,
                Some("v1") => Proc::V1,
                _ => Proc::V2,
            },
            hide: list("HIDE"),
            later: list("LATER"),
            lacks: list("LACKS"),
            mig: number("MIG") == Some(1),
            atomics: number("ATOMICS") == Some(1),
            reuse: number("REUSE") == Some(1),
            addresses: number("ADDRESSES") == Some(1),
            lose_after_copies: number("LOSE_AFTER_COPIES"),
            lost: number("LOST").unwrap_or(999) as i32,
            visible: var("CUDA_VISIBLE_DEVICES").ok().map(|names| split(&names)),
        }
    }

    pub(crate) fn lacks(&self, ability: &str) -> bool {
        self.lacks.iter().any(|name| name == ability)
    }
}

fn text(name: &str) -> Option<String> {
    var(format!("BEELINE_TEST_CUDA_{name}")).ok()
}

fn number(name: &str) -> Option<u64> {
    text(name)?.parse().ok()
}

fn list(name: &str) -> Vec<String> {
    split(&text(name).unwrap_or_default())
}

fn split(names: &str) -> Vec<String> {
    names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
