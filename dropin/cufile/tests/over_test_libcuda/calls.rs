//! `conformance.c` under different settings.

use std::path::Path;

use crate::tools::Bench;

/// Runs the groups of the conformance program (all where `group` is empty).
fn conforms(flags: &[&str], group: &str, env: &[(&str, &str)]) {
    let _ = conforms_and_says(flags, group, env);
}

/// [`conforms`]; answers what the program and the log said, where it could be run.
fn conforms_and_says(flags: &[&str], group: &str, env: &[(&str, &str)]) -> Option<String> {
    let bench = Bench::built()?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance.c");
    let program = bench.compile(&source, flags)?;
    let (library, files) = (bench.cufile.to_str().unwrap(), bench.folder().join("files"));
    let mut args = vec![library, files.to_str().unwrap()];
    args.extend((!group.is_empty()).then_some(group));
    let output = bench.run(&program, &args, env);
    let text = String::from_utf8_lossy(&output.stdout);
    let summed = text.lines().any(|line| line.ends_with(" checks, 0 failed"));
    assert!(output.status.success() && summed, "{group} {env:?}: {}\n{text}", output.status);
    Some(text.into_owned())
}

#[test]
fn every_call_answers_as_documented() {
    conforms(&[], "", &[]);
}

#[test]
fn also_where_copies_are_waited_for_by_events_or_words() {
    for waiting in ["event", "word"] {
        for group in ["edges", "batches", "streams", "threads"] {
            conforms(&[], group, &[("BEELINE_CUFILE_WAIT", waiting)]);
        }
    }
}

#[test]
fn also_without_stream_memory_operations_or_streams_to_wait_in() {
    let hide = "cuStreamWriteValue32,cuStreamQuery,cuStreamCreateWithPriority";
    for group in ["edges", "batches", "threads"] {
        conforms(&[], group, &[("BEELINE_TEST_CUDA_HIDE", hide)]);
    }
}

/// What the log says of requests that were not carried out in their stream.
const AT_CALL: &str = "are carried out at the call";

/// Requests in streams need no other stream: however few queues and slots there are.
#[test]
fn many_streams_wait_for_each_other_whatever_they_share() {
    for group in ["streams", "connections"] {
        let said = conforms_and_says(&[], group, &[("BEELINE_LOG", "info")]);
        assert!(said.is_none_or(|said| !said.contains(AT_CALL)), "{group}: not in the streams");
    }
    for more in [("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("BEELINE_POOL_BYTES", "16M")] {
        conforms(&[], "connections", &[more, ("BEELINE_STALL_SECONDS", "20")]);
    }
    for group in ["streams", "connections"] {
        conforms(&[], group, &[("BEELINE_POOL_BYTES", "1")]);
    }
}

/// Where the stream cannot wait or copy for them, they are carried out at the call, and it waits for no stream without
/// end.
#[test]
fn requests_in_streams_are_carried_out_at_the_call_where_nothing_else_goes() {
    let json = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(json.path(), r#"{ "miscellaneous": { "stream_memops_bypass": true } }"#)
        .unwrap();
    let bypass = ("CUFILE_ENV_PATH_JSON", json.path().to_str().unwrap());
    let later = |names| ("BEELINE_TEST_CUDA_LATER", names);
    let lacking = ("BEELINE_TEST_CUDA_LACKS", "memops");
    for more in [bypass, later("cuStreamWriteValue32"), later("cuCtxGetId"), lacking] {
        let env =
            [("CONFORMANCE_AT_CALL", "1"), ("BEELINE_STALL_SECONDS", "5"), ("BEELINE_LOG", "info")];
        let said = conforms_and_says(&[], "connections", &[more, env[0], env[1], env[2]]);
        assert!(said.is_none_or(|said| said.contains(AT_CALL)), "{more:?}: not at the call");
    }
}

/// 10,000 entries at once finish with 64 MiB of staging memory, and with two lanes alone.
#[test]
fn ten_thousand_entries_finish_with_a_small_pool() {
    for pool in ["64M", "1"] {
        for group in ["crowd", "threads", "streams"] {
            conforms(&[], group, &[("BEELINE_POOL_BYTES", pool)]);
        }
    }
}

#[test]
fn one_thread_a_request_and_direct_reads_alone() {
    let json = tempfile::NamedTempFile::new().unwrap();
    let text = "{ // comment\n \"execution\": { \"parallel_io\": false },\n \
                \"properties\": { \"force_odirect_mode\": true } }";
    std::fs::write(json.path(), text).unwrap();
    let path = json.path().to_str().unwrap();
    for group in ["matrix", "edges", "threads"] {
        conforms(&[], group, &[("CUFILE_ENV_PATH_JSON", path)]);
    }
}

/// Threads of one device take no more of the pool than they need, and leave another device its share.
#[test]
fn a_second_device_is_served_after_many_threads_of_the_first() {
    for pool in ["16M", "256M"] {
        let env = [("BEELINE_TEST_CUDA_DEVICES", "2"), ("BEELINE_STALL_SECONDS", "10")];
        conforms(&[], "devices", &[env[0], env[1], ("BEELINE_POOL_BYTES", pool)]);
    }
}

#[test]
fn lanes_come_back_whatever_became_of_a_request() {
    for waiting in ["driver", "event", "word"] {
        let env = [("BEELINE_STALL_SECONDS", "2"), ("BEELINE_CUFILE_WAIT", waiting)];
        conforms(&[], "stuck", &env);
    }
}

/// Bytes that are in the page cache are written there through mappings, wherever the kernel makes such copies.
#[test]
fn what_is_in_the_page_cache_is_written_there_without_the_lock_of_the_file() {
    let Some(bench) = Bench::built() else { return };
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(4096).unwrap();
    let window = beeline_sys::window::FileWindow::new(&file, 0, 4096).unwrap();
    let source = beeline_sys::mem::HostMem::anonymous(4096).unwrap();
    if let Err(error) = window.fill(0, 4096, &source, 0) {
        return println!("SKIP process_vm_readv: {error}");
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance.c");
    let Some(program) = bench.compile(&source, &[]) else { return };
    let files = tempfile::tempdir_in("/dev/shm").unwrap();
    let args = [bench.cufile.to_str().unwrap(), files.path().to_str().unwrap(), "rewrites"];
    for pool in ["256M", "1"] {
        let env = [("BEELINE_LOG", "info"), ("BEELINE_POOL_BYTES", pool)];
        let output = bench.run(&program, &args, &env);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        let mapped = text.split("written_mapped=").skip(1).filter_map(|rest| {
            rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok()
        });
        assert!(mapped.sum::<u64>() > 64 << 20, "{text}");
    }
}

#[test]
fn slab_classes_of_unequal_length_in_the_file_do_not_reach_the_caller() {
    let json = tempfile::NamedTempFile::new().unwrap();
    let text = "{ \"properties\": { \"posix_pool_slab_size_kb\": [4],\n \
                \"posix_pool_slab_count\": [1, 2, 3, 4, 5, 6, 7, 8] } }";
    std::fs::write(json.path(), text).unwrap();
    conforms(&[], "parameters", &[("CUFILE_ENV_PATH_JSON", json.path().to_str().unwrap())]);
}

/// Random arguments and every group again, with the C side watched for memory errors.
#[test]
fn nothing_writes_outside_of_what_the_caller_gave() {
    // The library is in another language and has its own checks; leaks are the program's own.
    let env = [("ASAN_OPTIONS", "detect_leaks=0"), ("CONFORMANCE_FUZZ", "20000")];
    conforms(&["-fsanitize=address"], "", &env);
}

#[test]
fn settings_that_forbid_what_there_is_refuse_to_open() {
    let Some(bench) = Bench::built() else { return };
    let source = bench.folder().join("open.c");
    let text = "#include <cufile.h>\n#include <dlfcn.h>\n#include <stdio.h>\n\
                int main(int c, char **v) { void *l = dlopen(v[1], RTLD_NOW);\n\
                CUfileError_t (*f)(void) = (CUfileError_t (*)(void))dlsym(l, \"cuFileDriverOpen\");\n\
                printf(\"%d\\n\", f().err); return 0; }\n";
    std::fs::write(&source, text).unwrap();
    let Some(program) = bench.compile(&source, &[]) else { return };
    let json = |name: &str, text: &str| {
        let path = bench.folder().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let cases = [
        (json("good.json", "{ \"properties\": { \"what\": 1 } } // ok\n"), "0"),
        (json("broken.json", "{ \"properties\": { oops\n"), "5022"),
        (json("direct.json", "{ \"properties\": { \"allow_compat_mode\": false } }"), "5001"),
        ("/nowhere/$PWD/cufile.json".to_owned(), "0"),
    ];
    for (path, expected) in cases {
        let env = [("CUFILE_ENV_PATH_JSON", path.as_str()), ("BEELINE_LOG", "off")];
        let output = bench.run(&program, &[bench.cufile.to_str().unwrap()], &env);
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected, "{path}");
    }
}
