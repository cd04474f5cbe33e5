//! Reading below a root, bounded, with a memory of what was denied.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

/// Largest file that is read whole, in bytes. Kernel symbol tables are the largest of them.
pub(super) const FILE_BYTES_MAX: usize = 64 << 20;
/// Entries of one directory.
const ENTRIES_MAX: usize = 65_536;
/// Denied paths that are remembered.
const DENIED_MAX: usize = 1024;

pub(super) struct Tree {
    root: PathBuf,
    denied: RefCell<Vec<String>>,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), denied: RefCell::default() }
    }

    fn join(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn deny(&self, path: &str) {
        let mut denied = self.denied.borrow_mut();
        if denied.len() < DENIED_MAX {
            denied.push(path.to_owned());
        }
    }

    pub(super) fn denied(&self) -> Vec<String> {
        self.denied.borrow().clone()
    }

    /// Content of a regular file, at most `bytes_max` of it; files of procfs and sysfs have no size.
    pub(super) fn read(&self, path: &str, bytes_max: usize) -> Option<Vec<u8>> {
        let full = self.join(path);
        // A device node or a pipe below a captured root must not be opened: it could block.
        if !fs::metadata(&full).ok()?.is_file() {
            return None;
        }
        let limit = u64::try_from(bytes_max).unwrap_or(u64::MAX);
        let mut bytes = Vec::new();
        let result = File::open(&full).and_then(|file| file.take(limit).read_to_end(&mut bytes));
        match result {
            Ok(_) => Some(bytes),
            Err(error) => {
                if error.kind() == ErrorKind::PermissionDenied {
                    self.deny(path);
                }
                None
            }
        }
    }

    /// Trimmed content of a small text file; `None` where it is absent or empty.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        let bytes = self.read(path, 16 << 10)?;
        let text = String::from_utf8(bytes).ok()?;
        let text = text.trim().trim_end_matches('\0');
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// Names in a directory, sorted.
    pub(super) fn list(&self, path: &str) -> Vec<String> {
        let entries = match fs::read_dir(self.join(path)) {
            Ok(entries) => entries,
            Err(error) => {
                if error.kind() == ErrorKind::PermissionDenied {
                    self.deny(path);
                }
                return Vec::new();
            }
        };
        let names = entries
            .take(ENTRIES_MAX)
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.join(path).symlink_metadata().is_ok()
    }

    /// Last component of a symbolic link's target.
    pub(super) fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.join(path)).ok()?;
        target.file_name()?.to_str().map(str::to_owned)
    }

    /// All components of a symbolic link's target.
    pub(super) fn link_parts(&self, path: &str) -> Vec<String> {
        let Ok(target) = fs::read_link(self.join(path)) else { return Vec::new() };
        let parts = target.components().filter_map(|part| match part {
            Component::Normal(name) => name.to_str().map(str::to_owned),
            _ => None,
        });
        parts.collect()
    }
}
