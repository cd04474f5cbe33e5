//! Little of everything: locked memory, descriptors, threads, system calls.

use std::fs;
use std::os::fd::OwnedFd;

use beeline::model::Model;
use beeline::storage::{File, StorageRoute};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::harness::{
    SIZE, file_in, folder_for_all, open_routes, parents_file, read, run_as_nobody, run_child,
};
use crate::support::{config, contents, engine, make_cold, open, sim, whole};

fn limit(resource: Resource, value: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(value), maximum }).unwrap();
}

#[test]
fn little_lockable_memory_closes_no_route() {
    let folder = folder_for_all();
    let path = file_in(folder.path());
    run_as_nobody("memlock", Some(&path));
}

pub(crate) fn memlock() {
    let path = parents_file();
    if open(&path).facts().memory_backed {
        return println!("SKIP drive (/var/tmp lies in memory)");
    }
    let gpu = sim(1 << 28);
    let direct = |report: beeline::storage::Report| {
        let direct = [StorageRoute::Direct, StorageRoute::ThreadPool];
        assert!(report.routes.iter().all(|part| direct.contains(&part.route)), "{report:?}");
    };
    // Newer kernels count rings as locked memory. Without any, threads read in their place ...
    limit(Resource::Memlock, 0);
    let without = open_routes(&path);
    let counted = !without.contains(&StorageRoute::Direct);
    assert_eq!(without.len(), if counted { 3 } else { 4 }, "{without:?}");
    make_cold(&path);
    direct(read(&gpu, &engine(&gpu), &path, None).unwrap());
    // ... the usual limit is enough, and what was short before is not remembered as forbidden ...
    limit(Resource::Memlock, 8 << 20);
    assert_eq!(open_routes(&path).len(), 4);
    // ... and where it runs out later, only who insists on rings gets an error.
    limit(Resource::Memlock, 0);
    make_cold(&path);
    direct(read(&gpu, &engine(&gpu), &path, None).unwrap());
    let insisted = read(&gpu, &engine(&gpu), &path, Some(StorageRoute::Direct));
    assert_eq!(insisted.err().and_then(|error| error.errno()), counted.then_some(12));
}

#[test]
fn a_filter_that_refuses_io_uring_leaves_threads() {
    let folder = folder_for_all();
    let path = file_in(folder.path());
    run_child(&[], "seccomp", Some(&path));
}

pub(crate) fn seccomp() {
    let path = parents_file();
    if open(&path).facts().memory_backed {
        return println!("SKIP drive (/var/tmp lies in memory)");
    }
    match beeline_sys::testing::deny_io_uring() {
        Ok(()) => crate::users::denied(&path),
        Err(error) => println!("SKIP seccomp ({error})"),
    }
}

#[test]
fn too_few_descriptors_are_an_error_and_pass() {
    let folder = folder_for_all();
    let path = file_in(folder.path());
    run_child(&[], "descriptors", Some(&path));
}

pub(crate) fn descriptors() {
    let path = parents_file();
    let gpu = sim(1 << 28);
    limit(Resource::Nofile, 32);
    many_shards();
    // Room for the file's two descriptors and for no ring: asked for by name, it is an error ...
    let held = exhaust(2);
    let file = std::sync::Arc::new(File::open(&path).unwrap());
    if file.facts().memory_backed {
        return println!("SKIP drive (/var/tmp lies in memory)");
    }
    let buffer = gpu.alloc(file.size()).unwrap();
    let ask = |route| {
        let mut request = whole(&file, &buffer);
        request.route = route;
        engine(&gpu).run(request)
    };
    let error = ask(Some(StorageRoute::Direct)).unwrap_err();
    assert!(format!("{error:#}").contains("Too many open files"), "{error:?}");
    // ... else the bytes come another way ...
    let report = ask(None).unwrap();
    assert!(report.routes.iter().all(|part| part.route != StorageRoute::Direct), "{report:?}");
    drop(held);
    assert!(contents(&gpu, &buffer) == crate::harness::bytes());
    // ... and what was short is not remembered as forbidden.
    ask(Some(StorageRoute::Direct)).unwrap();
    // The kernel once said yes; each worker still has to get its own.
    let held = exhaust(0);
    let error = ask(Some(StorageRoute::Direct)).unwrap_err();
    assert!(format!("{error:#}").contains("Too many open files"), "{error:?}");
    ask(None).unwrap();
    drop(held);
    assert!(contents(&gpu, &buffer) == crate::harness::bytes());
}

/// Opens files until only `spare` more descriptors are to be had.
fn exhaust(spare: usize) -> Vec<OwnedFd> {
    let mut held: Vec<OwnedFd> = Vec::new();
    while let Ok(file) = fs::File::open("/dev/null") {
        held.push(file.into());
    }
    held.truncate(held.len() - spare);
    held
}

/// A model of more shards than descriptors: an error that says what to raise, and nothing kept.
fn many_shards() {
    let folder = tempfile::tempdir().unwrap();
    let shards: Vec<_> = (0..40).map(|n| folder.path().join(format!("{n}.safetensors"))).collect();
    for shard in &shards {
        fs::write(shard, b"\x02\0\0\0\0\0\0\0{}").unwrap();
    }
    let error = Model::open(&shards).unwrap_err();
    assert_eq!(error.errno(), Some(24), "{error:?}");
    assert!(error.hint().is_some_and(|hint| hint.contains("ulimit -n")), "{error:?}");
    Model::open(&shards[..5]).unwrap();
}

#[test]
fn too_few_threads_are_an_error_and_pass() {
    let folder = folder_for_all();
    let path = file_in(folder.path());
    run_as_nobody("threads", Some(&path));
}

pub(crate) fn threads() {
    let path = parents_file();
    let gpu = sim(1 << 28);
    let most = getrlimit(Resource::Nproc).current.unwrap_or(1 << 16);
    let mut failed = 0;
    for threads in [0, 1, 2, 3, 4, 5, 6, 8, most] {
        let file = open(&path);
        let buffer = gpu.alloc(file.size()).unwrap();
        limit(Resource::Nproc, threads);
        let engine = beeline::storage::Engine::new(&gpu, config());
        let outcome = engine.run(whole(&file, &buffer));
        drop(engine);
        limit(Resource::Nproc, most);
        match outcome {
            Ok(report) => {
                assert_eq!(report.bytes, SIZE as u64);
                assert!(contents(&gpu, &buffer) == crate::harness::bytes(), "{threads} threads");
            }
            Err(error) => {
                assert!(threads != most, "{error:?}");
                assert!(error.to_string().contains("thread"), "{error:?}");
                failed += 1;
            }
        }
    }
    read(&gpu, &engine(&gpu), &path, None).unwrap();
    if failed == 0 {
        println!("SKIP thread-limit (it does not bind this user)");
    }
}
