//! Drives of other block sizes, other file systems, full ones, and drives without any.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use beeline::core::plan::{DirectIo, FileKind};
use beeline::storage::{Prober, Request, StorageRoute, WholeFile};
use tempfile::TempDir;

use crate::harness::{
    SIZE, bytes, cold_and_warm, facts, file_in, is_root, mount, open_routes, run,
    run_with_own_mounts,
};
use crate::support::{contents, engine, make_cold, open, segment, sim, upload, write};

fn check(child: &str) {
    if !is_root() {
        return println!("SKIP root ({child})");
    }
    run_with_own_mounts(child);
}

/// A block device over a file; given back when dropped.
struct Loop {
    device: PathBuf,
    image: PathBuf,
    folder: TempDir,
}

impl Loop {
    fn new(bytes: u64, block_bytes: u32) -> Option<Self> {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let image = folder.path().join("image");
        fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        let size = block_bytes.to_string();
        let arguments = ["--find", "--show", "--sector-size", &size].map(OsStr::new);
        let device = run("losetup", &[&arguments[..], &[image.as_os_str()]].concat());
        if device.is_none() {
            println!("SKIP losetup");
        }
        Some(Self { device: device?.into(), image, folder })
    }

    /// Makes a file system and mounts it; the folder.
    fn formatted(&self, make: &str, arguments: &[&str]) -> Option<PathBuf> {
        let mut line: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
        line.push(self.device.as_os_str());
        if run(make, &line).is_none() {
            println!("SKIP {make}");
            return None;
        }
        let place = self.folder.path().join("mounted");
        fs::create_dir(&place).unwrap();
        if !mount(&[self.device.as_os_str(), place.as_os_str()]) {
            println!("SKIP mount ({make})");
            return None;
        }
        Some(place)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run("umount", &[self.folder.path().join("mounted").as_os_str()]);
        let _ = run("losetup", &[OsStr::new("--detach"), self.device.as_os_str()]);
    }
}

/// What every file system on a drive must do.
fn check_drive(folder: &Path, name: &str) {
    let path = file_in(folder);
    let file = open(&path);
    assert_eq!(file.facts().file_system, name);
    assert!(!file.facts().memory_backed);
    assert_eq!(file.prober(), Prober::CacheStat, "{file:?}");
    assert_eq!(open_routes(&path).len(), 4, "{}", facts(&path));
    let (cold, warm) = cold_and_warm(&path);
    assert!(cold.iter().all(|part| part.ends_with(" not-resident")), "{cold:?}");
    assert_eq!(warm, ["page-cache resident"]);
    check_write(folder);
}

/// Device to file on every route; the bytes beside what is written keep their value.
fn check_write(folder: &Path) {
    let gpu = sim(1 << 28);
    let engine = engine(&gpu);
    let device = upload(&gpu, &bytes());
    for route in [StorageRoute::PageCache, StorageRoute::Direct, StorageRoute::ThreadPool] {
        let path = write(folder, "written", &vec![7; SIZE + 9000]);
        let whole = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let file = beeline::storage::File::for_writing(whole, &path).unwrap();
        let mut request =
            Request::write(vec![file.into()], vec![segment(3333, 0, SIZE as u64)], device.clone());
        request.route = Some(route);
        request.sync = true;
        engine.run(request).unwrap();
        make_cold(&path);
        let found = fs::read(&path).unwrap();
        assert!(found[3333..3333 + SIZE] == bytes(), "{route}");
        assert!(
            found[..3333].iter().chain(&found[3333 + SIZE..]).all(|byte| *byte == 7),
            "{route}"
        );
    }
}

#[test]
fn blocks_of_4096_bytes_are_respected() {
    check("ext4-4k-blocks");
}

pub(crate) fn ext4_with_4k_blocks() {
    let Some(drive) = Loop::new(128 << 20, 4096) else { return };
    let Some(folder) = drive.formatted("mkfs.ext4", &["-q"]) else { return };
    let path = file_in(&folder);
    let file = open(&path);
    let DirectIo::Aligned { offset, .. } = file.facts().direct else { panic!("{file:?}") };
    assert_eq!(offset, 4096, "{file:?}");
    drop(file);
    check_drive(&folder, "ext4");
}

#[test]
fn xfs_is_a_drive_like_any_other() {
    check("xfs");
}

pub(crate) fn xfs() {
    let Some(drive) = Loop::new(512 << 20, 512) else { return };
    let Some(folder) = drive.formatted("mkfs.xfs", &["-q"]) else { return };
    check_drive(&folder, "xfs");
}

#[test]
fn btrfs_is_a_drive_like_any_other() {
    check("btrfs");
}

pub(crate) fn btrfs() {
    let Some(drive) = Loop::new(512 << 20, 512) else { return };
    let Some(folder) = drive.formatted("mkfs.btrfs", &["-q"]) else { return };
    check_drive(&folder, "btrfs");
}

#[test]
fn a_full_file_system_is_read_and_keeps_its_old_files() {
    check("full");
}

pub(crate) fn full_file_system() {
    let Some(drive) = Loop::new(64 << 20, 512) else { return };
    let Some(folder) = drive.formatted("mkfs.ext4", &["-q"]) else { return };
    let path = file_in(&folder);
    let filler = fs::File::create(folder.join("filler")).unwrap();
    let mut at = 0;
    while filler.write_all_at(&[1; 4096], at).is_ok() {
        at += 4096;
    }
    let _ = filler.sync_all();
    assert_eq!(open_routes(&path).len(), 4);
    let error = WholeFile::create(&path, 1 << 20, 0o644).unwrap_err();
    assert_eq!(error.errno(), Some(28), "{error:?}");
    assert!(error.hint().is_some_and(|hint| hint.contains("free space")), "{error:?}");
    assert!(fs::read(&path).unwrap() == bytes());
    // A file that is grown block by block fails in the middle, and says where.
    let gpu = sim(1 << 28);
    let device = upload(&gpu, &bytes());
    for route in [StorageRoute::PageCache, StorageRoute::Direct, StorageRoute::ThreadPool] {
        let place = folder.join("growing");
        let mut options = fs::File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(&place).unwrap();
        let file = beeline::storage::File::for_writing(file, &place).unwrap();
        let mut request =
            Request::write(vec![file.into()], vec![segment(0, 0, SIZE as u64)], device.clone());
        request.route = Some(route);
        request.sync = true;
        let error = engine(&gpu).run(request).unwrap_err();
        assert_eq!(error.errno(), Some(28), "{route}: {error:?}");
        assert!(error.to_string().contains("growing"), "{error:?}");
    }
}

#[test]
fn a_block_device_is_a_drive_and_not_the_folder_of_its_node() {
    check("block-device");
}

pub(crate) fn block_device() {
    for block_bytes in [512, 4096] {
        // Whole blocks only: a drive has no others.
        let size = (SIZE as u64).next_multiple_of(4096);
        let Some(drive) = Loop::new(size, block_bytes) else { return };
        let mut expected = bytes();
        expected.resize(size as usize, 9);
        fs::OpenOptions::new().write(true).open(&drive.image).unwrap();
        fs::OpenOptions::new()
            .write(true)
            .open(&drive.device)
            .unwrap()
            .write_all_at(&expected, 0)
            .unwrap();
        make_cold(&drive.device);
        let file = open(&drive.device);
        assert_eq!((file.facts().kind, file.size()), (FileKind::Block, size), "{file:?}");
        assert_eq!(file.facts().file_system, "block device");
        assert!(!file.facts().memory_backed, "its node lies in devtmpfs, its bytes do not");
        let DirectIo::Aligned { offset, .. } = file.facts().direct else { panic!("{file:?}") };
        assert_eq!(offset, block_bytes, "{file:?}");
        let gpu = sim(1 << 28);
        let engine = engine(&gpu);
        for route in [
            None,
            Some(StorageRoute::Direct),
            Some(StorageRoute::ThreadPool),
            Some(StorageRoute::PageCache),
            Some(StorageRoute::MappedPageCache),
        ] {
            make_cold(&drive.device);
            let buffer = gpu.alloc(size).unwrap();
            let mut request = crate::support::whole(&file, &buffer);
            request.route = route;
            let report = engine.run(request).unwrap();
            assert!(contents(&gpu, &buffer) == expected, "{route:?}");
            if route.is_none() {
                let parts: Vec<_> = report.routes.iter().map(|part| part.why.as_str()).collect();
                assert_eq!(parts, ["not-resident"], "{report:?}");
            }
        }
    }
}
