//! Writing a whole file so that its name always has either the old contents or the new.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};

use super::file::File;
use crate::error::{Error, Result};
use crate::folder_of;

/// A file being written under no name, or a temporary one, that takes its name in [`Self::commit`].
///
/// Dropped before that, it leaves nothing behind and the old file as it was. Where the file system
/// has nameless files (`O_TMPFILE`), not even killing the process leaves a temporary file.
#[derive(Debug)]
pub struct WholeFile {
    file: Arc<File>,
    target: PathBuf,
    /// The temporary name, while there is one.
    temporary: Option<PathBuf>,
}

impl WholeFile {
    /// Prepares to write `size` bytes to `path`, all of which are reserved on the drive now.
    ///
    /// A symbolic link is followed to the file that it names. An existing file keeps its permissions;
    /// a new one gets `mode` less the process's umask.
    ///
    /// # Errors
    /// `is_refused` where `path` names something other than a regular file, or cannot name one (it ends
    /// as the name of a folder, or is a link to nothing); what the system says, `ENOSPC` where there is
    /// not enough room: the old file is untouched then.
    pub fn create(path: impl AsRef<Path>, size: u64, mode: u32) -> Result<Self> {
        let path = path.as_ref();
        let (target, exact) = match fs::metadata(path) {
            Ok(meta) if !meta.is_file() => {
                return Err(Error::refused(format!("{} is not a regular file", path.display()))
                    .remedy("name a file to write"));
            }
            Ok(meta) => {
                use std::os::unix::fs::PermissionsExt;
                let target = fs::canonicalize(path).map_err(|e| Error::at("resolve", path, e))?;
                (target, Some(meta.permissions().mode() & 0o7777))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                refuse_no_file_name(path)?;
                (path.to_owned(), None)
            }
            Err(error) => return Err(Error::at("examine", path, error)),
        };
        let (fd, temporary) = open_temporary(&target, exact.unwrap_or(mode))?;
        let mut part = PartWritten { temporary };
        if let Some(exact) = exact {
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(exact))
                .map_err(|error| Error::at("set the permissions of", &target, error.into()))?;
        }
        reserve(&fd, size, &target)?;
        let file = Arc::new(File::from_fd(fd, &target, true)?);
        Ok(Self { file, target, temporary: part.temporary.take() })
    }

    /// The file to write into.
    pub const fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Sets the permission bits that the file will have, whatever those of the old one are.
    ///
    /// # Errors
    /// What `fchmod(2)` says.
    pub fn set_mode(&self, mode: u32) -> Result<()> {
        rustix::fs::fchmod(&**self.file.buffered(), Mode::from_raw_mode(mode & 0o7777))
            .map_err(|error| Error::at("set the permissions of", &self.target, error.into()))
    }

    /// Gives the file its name, in one step that no reader can see half of. With `sync`, the bytes
    /// and the name are on the drive when this returns.
    ///
    /// # Errors
    /// What the system says. The old file is untouched then, but for one case: where the folder cannot
    /// be flushed at the end, the text says so, and the new file is in its place.
    pub fn commit(mut self, sync: bool) -> Result<()> {
        let fail = |error: io::Error| Error::at("replace", &self.target, error);
        let folder = folder_of(&self.target);
        // Opened first: a folder that cannot be opened could not be flushed either.
        let folder = if sync { Some(fs::File::open(folder).map_err(fail)?) } else { None };
        if sync {
            rustix::fs::fsync(&**self.file.buffered()).map_err(|e| fail(e.into()))?;
        }
        let temporary = match self.temporary.take() {
            Some(name) => name,
            None => link(&**self.file.buffered(), &self.target).map_err(fail)?,
        };
        if let Err(error) = fs::rename(&temporary, &self.target) {
            let error = fail(error);
            self.temporary = Some(temporary); // Dropping `self` removes it.
            return Err(error);
        }
        folder.map_or(Ok(()), |folder| folder.sync_all()).map_err(|error| {
            let what =
                format!("flush the folder of {}, which has its new file", self.target.display());
            Error::io(what, error)
        })
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        drop(PartWritten { temporary: self.temporary.take() });
    }
}

/// Removes a temporary name unless it was taken out.
struct PartWritten {
    temporary: Option<PathBuf>,
}

impl Drop for PartWritten {
    fn drop(&mut self) {
        if let Some(name) = self.temporary.take() {
            // Nothing can be done about a failure here, and the name says what it is.
            let _ = fs::remove_file(name);
        }
    }
}

/// Refuses a path that names nothing and could never name a file, before a byte moves for it.
fn refuse_no_file_name(path: &Path) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;

    // Looked at as the kernel does: `Path` takes `name/` and `name/.` for `name`.
    let last = path.as_os_str().as_bytes().rsplit(|byte| *byte == b'/').next();
    if matches!(last, None | Some(b"" | b"." | b"..")) {
        let text = format!("'{}' is the name of a folder that is not there", path.display());
        return Err(Error::refused(text).remedy("make the folder first, or name a file to write"));
    }
    if let Ok(to) = fs::read_link(path) {
        let text = format!("{} is a symbolic link to {}", path.display(), to.display());
        return Err(Error::refused(format!("{text}, which is not there"))
            .remedy("name the file that it points to, or remove the link"));
    }
    Ok(())
}

/// A new file in the folder of `target`: nameless where that works, else with a name to remove.
fn open_temporary(target: &Path, mode: u32) -> Result<(OwnedFd, Option<PathBuf>)> {
    let folder = folder_of(target);
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(mode & 0o7777);
    if let Ok(fd) = rustix::fs::open(folder, flags | OFlags::TMPFILE, mode)
        // `link` will need it; better no nameless file than one that can never get its name.
        && Path::new(&own_path(&fd)).exists()
    {
        return Ok((fd, None));
    }
    for _ in 0..100 {
        let name = temporary_name(target);
        match rustix::fs::open(&name, flags | OFlags::CREATE | OFlags::EXCL, mode) {
            Ok(fd) => return Ok((fd, Some(name))),
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(Error::at("create a file in", folder, error.into())),
        }
    }
    Err(Error::at("create a file in", folder, io::ErrorKind::AlreadyExists.into()))
}

fn reserve(fd: &OwnedFd, size: u64, target: &Path) -> Result<()> {
    use rustix::io::Errno;

    if size == 0 {
        return Ok(());
    }
    let fail = |error: Errno| {
        Error::io(
            format_args!("reserve {size} bytes for {}", target.display()),
            io::Error::from(error),
        )
    };
    match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, size) {
        Ok(()) => Ok(()),
        // The file system cannot reserve; a lack of room then shows while writing.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::fs::ftruncate(fd, size).map_err(fail),
        Err(error) => Err(fail(error)),
    }
}

/// Gives a nameless file a temporary name beside `target`.
fn link(fd: impl AsFd, target: &Path) -> io::Result<PathBuf> {
    let source = own_path(&fd);
    for _ in 0..100 {
        let name = temporary_name(target);
        match rustix::fs::linkat(CWD, &source, CWD, &name, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => return Ok(name),
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// The name that procfs, where it is mounted, gives an open file.
fn own_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Longest file name in bytes on the file systems in use, `NAME_MAX`.
const NAME_BYTES_MAX: usize = 255;

/// `.NAME.beeline-PID-N` beside `target`; a NAME too long for all of that is cut.
fn temporary_name(target: &Path) -> PathBuf {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let end = format!(".beeline-{}-{number}", std::process::id());
    let whole = target.file_name().unwrap_or_default();
    let room = NAME_BYTES_MAX.saturating_sub(1 + end.len());
    // File systems that count characters, or want text, must find no half of one.
    let kept = match whole.to_str() {
        Some(text) => OsStr::new(text.get(..text.floor_char_boundary(room)).unwrap_or_default()),
        None => OsStr::from_bytes(whole.as_bytes().get(..room).unwrap_or(whole.as_bytes())),
    };
    let mut name = std::ffi::OsString::from(".");
    name.push(kept);
    name.push(end);
    folder_of(target).join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_a_file_that_was_never_committed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, b"old").unwrap();
        drop(WholeFile::create(&path, 1 << 20, 0o644).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        WholeFile::create(&path, 4, 0o600).unwrap().commit(true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [0; 4]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn a_lack_of_room_is_known_before_the_first_byte() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, b"old").unwrap();
        let error = WholeFile::create(&path, 1 << 60, 0o644).unwrap_err();
        assert!(error.errno().is_some(), "{error:?}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert!(WholeFile::create(folder.path(), 1, 0o644).unwrap_err().is_refused());
    }

    #[test]
    fn the_longest_name_has_a_temporary_one() {
        let folder = tempfile::tempdir().unwrap();
        for (name, cut) in [("a".repeat(255), 0), ("\u{e9}".repeat(127), 1), ("a".to_owned(), 0)] {
            let path = folder.path().join(name);
            for _ in 0..2 {
                WholeFile::create(&path, 4, 0o600).unwrap().commit(false).unwrap();
                assert_eq!(fs::read(&path).unwrap(), [0; 4]);
            }
            let temporary = temporary_name(&path);
            let len = temporary.file_name().unwrap().len();
            let whole = path.file_name().unwrap().len();
            assert!(len <= 255 && (whole < 100 || len + cut >= 255), "{len}");
            assert!(temporary.to_str().is_some());
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3);
    }

    #[test]
    fn a_path_that_can_name_no_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("gone", &link).unwrap();
        let at = |name: &str| format!("{}/{name}", folder.path().display());
        for path in [String::new(), at("new/"), at("new/."), at("new/.."), at("link"), at("link/")]
        {
            let error = WholeFile::create(&path, 1, 0o644).unwrap_err();
            assert!(error.is_refused(), "{path}: {error:?}");
        }
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("gone"));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }
}
