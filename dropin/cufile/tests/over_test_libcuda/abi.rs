//! Sizes, offsets and numbers of the header, and the exported symbols.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::tools::Bench;

#[test]
fn layouts_and_numbers_are_those_of_the_interface() {
    let Some(bench) = Bench::built() else { return };
    let facts = [
        ("sizeof(CUfileError_t)", 8),
        ("offsetof(CUfileError_t, cu_err)", 4),
        ("sizeof(CUfileDescr_t)", 24),
        ("offsetof(CUfileDescr_t, handle)", 8),
        ("offsetof(CUfileDescr_t, fs_ops)", 16),
        ("sizeof(CUfileDrvProps_t)", 56),
        ("offsetof(CUfileDrvProps_t, nvfs.poll_thresh_size)", 8),
        ("offsetof(CUfileDrvProps_t, nvfs.dstatusflags)", 24),
        ("offsetof(CUfileDrvProps_t, fflags)", 32),
        ("offsetof(CUfileDrvProps_t, max_device_cache_size)", 36),
        ("offsetof(CUfileDrvProps_t, max_batch_io_timeout_msecs)", 52),
        ("sizeof(CUfileIOParams_t)", 64),
        ("offsetof(CUfileIOParams_t, u.batch.devPtr_base)", 8),
        ("offsetof(CUfileIOParams_t, u.batch.file_offset)", 16),
        ("offsetof(CUfileIOParams_t, u.batch.devPtr_offset)", 24),
        ("offsetof(CUfileIOParams_t, u.batch.size)", 32),
        ("offsetof(CUfileIOParams_t, fh)", 40),
        ("offsetof(CUfileIOParams_t, opcode)", 48),
        ("offsetof(CUfileIOParams_t, cookie)", 56),
        ("sizeof(CUfileIOEvents_t)", 24),
        ("offsetof(CUfileIOEvents_t, status)", 8),
        ("offsetof(CUfileIOEvents_t, ret)", 16),
        ("sizeof(CUfileIOVec_t)", 16),
        ("sizeof(CUfileOpCounter_t)", 16),
        ("sizeof(CUfileStatsLevel1_t)", 624),
        ("offsetof(CUfileStatsLevel1_t, read_bytes)", 96),
        ("offsetof(CUfileStatsLevel1_t, batch_submit_ops)", 176),
        ("offsetof(CUfileStatsLevel1_t, batch_read_bytes)", 416),
        ("offsetof(CUfileStatsLevel1_t, readv_ops)", 512),
        ("sizeof(CUfileStatsLevel2_t)", 1136),
        ("offsetof(CUfileStatsLevel2_t, read_size_kb_hist)", 624),
        ("sizeof(CUfilePerGpuStats_t)", 248),
        ("sizeof(CUfileStatsLevel3_t)", 5112),
        ("offsetof(CUfileStatsLevel3_t, num_gpus)", 1136),
        ("offsetof(CUfileStatsLevel3_t, per_gpu_stats)", 1144),
        ("CU_FILE_DRIVER_NOT_INITIALIZED", 5001),
        ("CU_FILE_INVALID_VALUE", 5022),
        ("CU_FILE_HANDLE_NOT_REGISTERED", 5027),
        ("CU_FILE_ASYNC_NOT_SUPPORTED", 5038),
        ("CU_FILE_HANDLE_TYPE_OPAQUE_FD", 1),
        ("CUFILE_BATCH", 1),
        ("CUFILE_WRITE", 1),
        ("CUFILE_CANCELED", 8),
        ("CUFILE_COMPLETE", 16),
        ("CUFILE_FAILED", 64),
    ];
    let mut text = "#include <cufile.h>\n".to_owned();
    for (what, value) in facts {
        text += &format!("_Static_assert({what} == {value}, \"{what}\");\n");
    }
    text += "int main(void) { return 0; }\n";
    let source = bench.folder().join("abi.c");
    std::fs::write(&source, text).unwrap();
    assert!(bench.compile(&source, &[]).is_some());
}

/// The header's words for a code are the library's.
#[test]
fn a_code_has_the_same_words_in_the_header_and_in_the_log() {
    let Some(bench) = Bench::built() else { return };
    let text = "#include <cufile.h>\n#include <stdio.h>\nint main(void) {\n\
                for (int i = 5000; i < 5050; i++) printf(\"%s\\n\", CUFILE_ERRSTR(i % 2 ? i : -i));\n\
                return IS_CUFILE_ERR(-5001) && !IS_CUFILE_ERR(5000) ? 0 : 1; }\n";
    let source = bench.folder().join("words.c");
    std::fs::write(&source, text).unwrap();
    let Some(program) = bench.compile(&source, &[]) else { return };
    let output = bench.run(&program, &[], &[]);
    assert!(output.status.success());
    let words = String::from_utf8(output.stdout).unwrap();
    let known = |&(_, word): &(i32, &str)| !word.ends_with("this library does not answer");
    let header: Vec<_> = (5000..).zip(words.lines()).filter(known).collect();
    let own = |code| (code, beeline::cufile::OpError(code).text());
    let library: Vec<_> =
        (5000..5050).map(own).filter(|(_, word)| *word != "unknown cuFile error").collect();
    assert_eq!(header, library);
}

#[test]
fn exports_are_the_committed_ones_and_the_header_declares_each() {
    let Some(bench) = Bench::built() else { return };
    let Ok(output) = Command::new("nm").args(["-D", "--defined-only"]).arg(&bench.cufile).output()
    else {
        println!("SKIP nm");
        return;
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let functions = text.lines().filter_map(|line| line.split_once(" T "));
    let found: BTreeSet<&str> = functions.map(|(_, name)| name).collect();
    let listed: BTreeSet<&str> = include_str!("../symbols.txt").lines().collect();
    assert_eq!(found, listed);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = std::fs::read_to_string(root.join("include/cufile.h")).unwrap();
    for name in listed {
        assert!(header.contains(&format!("{name}(")), "{name} is not in the header");
    }
    let names = Command::new("readelf").arg("-d").arg(&bench.cufile).output().unwrap().stdout;
    let names = String::from_utf8(names).unwrap();
    assert!(names.contains("[libcufile.so.0]") && names.contains("NODELETE"), "{names}");
}
