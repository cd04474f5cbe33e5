//! Logs, configurations, and what tools print about a stack.

use super::*;

#[test]
fn logs_of_nccl() {
    let Some(m) = handed("nccl-log/a100pcie-nvlink-bridge-normal.log", Kind::NcclLog) else {
        return;
    };
    let report = run(&m);
    let gdr = only(&report, "gdr-disabled");
    assert_eq!((gdr.severity, gdr.subjects.len()), (Severity::Info, 3));
    assert!(words(gdr).contains("one node"));
    assert_eq!(only(&report, "nccl-benign").severity, Severity::Info);
    let summary = words(only(&report, "nccl-summary"));
    for part in ["NCCL 2.27.7", "24 channels", "NVL 240.0", "178.078"] {
        assert!(summary.contains(part), "{part} in {summary}");
    }
    no_failure(&m);

    let m = handed("nccl-log/gdr-disabled-roce.log", Kind::NcclLog).unwrap();
    let report = run(&m);
    let gdr = only(&report, "gdr-disabled");
    assert_eq!(
        (gdr.severity, gdr.subjects.as_slice()),
        (Severity::Warning, &["mlx5_0".to_string(), "mlx5_1".to_string()][..])
    );
    for part in ["memory_peers", "lsmod", "dma-buf", "does not say why"] {
        assert!(words(gdr).contains(part), "{part}");
    }

    let m = handed("nccl-log/topo-arch-attr-missing.log", Kind::NcclLog).unwrap();
    let report = run(&m);
    let found = only(&report, "topo-xml-missing-attr");
    assert_eq!((found.status, found.severity), (Status::Fail, Severity::Error));
    assert!(found.subjects.is_empty() && words(found).contains("the topology file ("));

    let m = handed("nccl-log/collective-mismatch.log", Kind::NcclLog).unwrap();
    let report = run(&m);
    assert_eq!(only(&report, "rank-env-mismatch").candidates.len(), 2);
}

#[test]
fn output_of_gdscheck() {
    let Some(m) = handed("gdscheck/gds-1.14.0-rtx6000ada-nvme-ok-rdma-none.txt", Kind::Gdscheck)
    else {
        return;
    };
    let gds = m.platform.gds.as_ref().unwrap();
    assert_eq!(gds.nvfs.known().unwrap(), "2.24");
    assert_eq!(gds.rows["NVMe"].value, "Supported");
    assert_eq!(gds.rows["NVMe P2PDMA"].value, "Unsupported");
    assert_eq!(gds.properties["properties.use_compat_mode"].value, "false");
    assert_eq!(gds.iommu.known().unwrap(), "disabled");
    assert_eq!(gds.verdict.known().unwrap(), "succeeded");
    assert!(!m.sources[0].truncated);
    assert_eq!(m.gpus.len(), 2);
    assert!(m.gpus.iter().all(|g| g.bar1_bytes.known() == Some(&(65_536 << 20))));
    let report = run(&m);
    assert!(
        words(only(&report, "gds-no-native-path"))
            .contains("direct path for NVMe (nvidia-fs 2.24)")
    );
    assert!(words(only(&report, "gds-rdma-storage")).contains("Not Loaded"));
    no_failure(&m);

    for (file, minimum) in [
        ("gdscheck/gds-1.13.1-rtx5090-no-nvidia-fs-truncated.txt", None),
        ("gdscheck/gds-1.16.0-turin-5090-compat-only-truncated.txt", Some("2.12")),
    ] {
        let m = handed(file, Kind::Gdscheck).unwrap();
        let gds = m.platform.gds.as_ref().unwrap();
        assert_eq!(gds.nvfs, None);
        assert_eq!(gds.nvfs_minimum.known().map(String::as_str), minimum);
        assert!(m.sources[0].truncated && !gds.gpu_section && m.gpus.is_empty());
        let report = run(&m);
        let native = words(only(&report, "gds-no-native-path"));
        assert!(native.contains("not loaded") && native.contains("not visible here"));
        assert_eq!(native.contains("is a requirement"), minimum.is_some());
        assert!(words(only(&report, "gds-compat")).contains("allowed"));
    }

    let m =
        handed("gdscheck/gds-1.0.1-nvme-nvmeof-supported-truncated.txt", Kind::Gdscheck).unwrap();
    let native = words(only(&run(&m), "gds-no-native-path"));
    assert!(native.contains("NVMe, NVMeOF"), "{native}");
    no_failure(&m);
}

#[test]
fn configuration_of_cufile() {
    let Some(m) = handed("cufile-json/minimal-big-cache.json", Kind::CufileJson) else { return };
    let report = run(&m);
    let pool = only(&report, "cufile-json-posix-pool");
    assert_eq!(pool.severity, Severity::Warning);
    assert!(words(pool).contains("8.50 GiB"));
    assert!(words(only(&report, "cufile-json-pinned-too-small")).contains("32768 MiB"));
    assert_eq!(report.failures().count(), 1);

    let m = handed("cufile-json/weka-dynamic-routing-comments.json", Kind::CufileJson).unwrap();
    assert_eq!(m.platform.cufile["fs.weka.rdma_dev_addr_list"].value.len(), 3);
    assert!(!m.platform.cufile.contains_key("fs.weka.rdma_write_support"));
    let report = run(&m);
    let text = words(only(&report, "cufile-effective-path"));
    for part in ["dynamic routing is on, 3 RDMA addresses", "weka:", "write=posix"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let slow = only(&report, "cufile-json-slow");
    assert!(words(slow).contains("DEBUG") && words(slow).contains("cufile_stats 3"));
    assert_eq!(report.failures().count(), 1);
}

#[test]
fn logs_of_cufile() {
    let Some(m) = handed("cufile-log/numa-and-libcuda-missing.log", Kind::CufileLog) else {
        return;
    };
    let report = run(&m);
    let numa = only(&report, "cufile-numa-bind");
    assert_eq!(numa.severity, Severity::Info);
    for part in ["96 threads", "node 3: 80", "node 1: 16", "errno 22", "cpuset"] {
        assert!(words(numa).contains(part), "{part}");
    }
    let library = only(&report, "cufile-library-missing");
    assert_eq!((library.status, library.severity), (Status::Fail, Severity::Error));
    assert!(words(library).contains("libcuda.so.1 (4 times)"));
    assert_eq!(report.failures().count(), 1);

    let m = handed("cufile-log/nvme-not-registered-ext4.log", Kind::CufileLog).unwrap();
    let block = &m.platform.blocks["nvme1n1p2"];
    assert_eq!(block.fs.known().unwrap(), "ext4");
    assert_eq!(block.journal.known().unwrap(), "ordered");
    assert_eq!((block.numa.known(), block.logical_bytes.known()), (Some(&-1), Some(&4096)));
    let report = run(&m);
    let found = only(&report, "gds-nvme-not-registered");
    assert_eq!((found.status, found.severity), (Status::Fail, Severity::Error));
    assert!(
        found.candidates[0].contains("gds-nvme-not-patched") && words(found).contains("kallsyms")
    );
    assert_eq!(only(&report, "gds-nvme-not-patched").status, Status::Pass);
    assert!(words(only(&report, "gds-compat")).contains("I/O works"));
    assert_eq!(report.failures().count(), 1);

    let m = handed("cufile-log/bar1-exhausted.log", Kind::CufileLog).unwrap();
    assert!(words(only(&run(&m), "bar1-exhausted")).contains("need 524288000 have 281018368"));

    let m = handed("cufile-log/overlay-no-udev-device.log", Kind::CufileLog).unwrap();
    let found = words(only(&run(&m), "gds-fs-unsupported"));
    assert!(
        found.contains("0:383")
            && found.contains("does not name the file system")
            && found.contains("mountinfo")
    );

    let m = handed("cufile-log/p2pdma-not-supported-801.log", Kind::CufileLog).unwrap();
    let block = &m.platform.blocks["nvme0n1p4"];
    assert_eq!(block.numa.known(), Some(&1));
    assert_eq!(block.controller.known().unwrap().to_string(), "0000:85:02.0");
    let report = run(&m);
    assert_eq!(only(&report, "gds-p2pdma-off").severity, Severity::Info);
    let path = only(&report, "gds-path");
    assert_eq!(
        (path.status, path.candidates.as_slice()),
        (Status::Unknown, &["nvfs".to_string(), "compat".to_string()][..])
    );
    no_failure(&m);
}

#[test]
fn kernel_logs_and_small_files() {
    let Some(m) = handed("dmesg/peermem-disagrees-version.log", Kind::KernelLog) else { return };
    assert_eq!(run(&m).failures().map(|f| f.check).collect::<Vec<_>>(), ["peermem-abi-mismatch"]);
    let m = handed("dmesg/gdrdrv-misaligned-length-gh200.log", Kind::KernelLog).unwrap();
    assert_eq!(run(&m).failures().map(|f| f.check).collect::<Vec<_>>(), ["gdrdrv-pin-unaligned"]);
    let m = handed("dmesg/amdvi-io-page-fault-gpu.log", Kind::KernelLog).unwrap();
    let report = run(&m);
    assert_eq!(
        report.failures().map(|f| (f.check, f.severity)).collect::<Vec<_>>(),
        [("p2p-iommu-fault", Severity::Critical)]
    );
    assert!(words(only(&report, "p2p-iommu-fault")).contains("3 IOMMU faults"));
    let m = handed("dmesg/kmsg-peermem-invalid-context.log", Kind::KernelLog).unwrap();
    assert_eq!(m.events.len(), 1);
    assert!(words(only(&run(&m), "peermem-invalid-context")).contains("7 times"));
    no_failure(&m);

    let m = handed("ibv/cx7-two-ports-down.txt", Kind::IbvDevinfo).unwrap();
    let report = run(&m);
    let down = only(&report, "port-down");
    assert_eq!((down.severity, down.subjects.len()), (Severity::Info, 2));
    assert!(!words(down).contains("MTU"));
    no_failure(&m);
    let asked = from_inputs(&["handed:ibv/cx7-two-ports-down.txt", "env-hca.txt"]).unwrap();
    let report = run(&asked);
    assert!(
        report
            .of("port-down")
            .iter()
            .any(|f| f.severity == Severity::Error && f.subjects == ["mlx5_0 port 1"])
    );

    let m = handed("params/h100-580.105-params.txt", Kind::NvidiaParams).unwrap();
    assert_eq!(m.platform.params.len(), 42);
    for (key, value) in [
        ("EnableStreamMemOPs", "0"),
        ("RegistryDwords", ""),
        ("GrdmaPciTopoCheckOverride", "1"),
        ("EnablePCIERelaxedOrderingMode", "0"),
        ("CoherentGPUMemoryMode", "driver"),
        ("TemporaryFilePath", "/var/tmp"),
    ] {
        assert_eq!(m.platform.params[key].value, value, "{key}");
    }
    no_failure(&m);
}

#[test]
fn captured_infiniband_tree() {
    let Some(m) = handed("sysfs/h100-sys-class-infiniband", Kind::SysfsInfiniband) else { return };
    for (name, model, rate, layer) in [
        ("mlx5_0", "MT4129", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_1", "MT4129", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_bond_0", "MT41692", "200 Gb/sec (2X NDR)", "Ethernet"),
    ] {
        let nic = &m.nics[name];
        let port = &nic.ports[&1];
        assert_eq!(nic.model.known().unwrap(), model);
        assert_eq!(port.rate.known().unwrap(), rate);
        assert_eq!(port.link_layer.known().unwrap(), layer);
        assert_eq!(port.state.known().unwrap(), "ACTIVE");
    }
    let report = run(&m);
    let found = report.of("counter-saturated");
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|f| f.severity == Severity::Warning && f.status == Status::Fail));
    assert!(words(found[0]).contains("link_downed is >=255, saturated"));
    assert_eq!(found[0].subjects, ["mlx5_1 port 1"]);
    assert!(words(found[1]).contains("excessive_buffer_overrun_errors is >=15, saturated"));
    assert_eq!(found[1].subjects.len(), 3);
    assert_eq!(report.failures().count(), 2);
}
