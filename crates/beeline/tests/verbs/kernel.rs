//! The suite over NICs of the kernel's, and what only they have.

use std::net::IpAddr;

use beeline::gpu::{Gpu, Profile};
use beeline::verbs::{Access, IbvOptions, LinkKind, Mtu, Nic, NicInfo, SoftOptions, Status};

use super::cases::Can;
use super::{private, suite};

/// The NICs of the kernel's that can be used; a SKIP where there is none.
fn nics() -> Option<Vec<NicInfo>> {
    let usable = |nic: &NicInfo| !nic.gids.is_empty();
    let nics: Vec<_> = match Nic::list() {
        Ok(nics) => nics.into_iter().filter(usable).collect(),
        Err(error) => panic!("{error:#}"),
    };
    if nics.is_empty() {
        println!("SKIP RDMA device");
        return None;
    }
    Some(nics)
}

/// `NAME` of a device of the kernel's, or the address of a NIC in software.
fn nic(text: &str) -> Nic {
    match text.parse::<IpAddr>() {
        // The network of the guest may hide its sizes.
        Ok(local) => Nic::soft(SoftOptions::new(local).mtu(Mtu::MAX)).unwrap(),
        Err(_) => Nic::ibv(IbvOptions::new().device(text)).unwrap(),
    }
}

/// Of a pair: what the side that answers can do decides.
fn can(of: &NicInfo, responder_is_soft: bool) -> Can {
    let rxe = of.soft_roce;
    Can {
        datagrams: true,
        access_event: responder_is_soft || !rxe,
        exact_cq: false,
        revoked: if rxe { Status::LocalQpOperation } else { Status::LocalProtection },
    }
}

/// The pairs that `BEELINE_VERBS_NICS` names, as `rxe0,rxe1 rxe0,10.9.0.2`; else the first device with
/// itself.
#[test]
fn nics_of_the_kernel() {
    let Some(nics) = nics() else { return };
    let first = nics[0].name.clone();
    let pairs = std::env::var("BEELINE_VERBS_NICS").unwrap_or(format!("{first},{first}"));
    for pair in pairs.split_whitespace() {
        let (a, b) = pair.split_once(',').unwrap();
        println!("pair: {a} and {b}");
        let known = nics.iter().find(|nic| [a, b].contains(&nic.name.as_str())).unwrap();
        let soft = |name: &str| name.parse::<IpAddr>().is_ok();
        let (mut there, mut back) = (can(known, soft(b)), can(known, soft(a)));
        // Who posts a receive, or makes a queue that is overrun, is the first of the pair.
        for (can, first) in [(&mut there, a), (&mut back, b)] {
            if soft(first) {
                (can.exact_cq, can.revoked) = (true, Can::SOFT.revoked);
            }
        }
        let (nic_a, nic_b) = (nic(a), nic(b));
        suite(&nic_a, &nic_b, there, private);
        suite(&nic_b, &nic_a, back, private);
    }
}

#[test]
fn a_device_says_what_it_is_and_why() {
    let Some(nics) = nics() else { return };
    for info in &nics {
        let nic = Nic::ibv(IbvOptions::new().device(&info.name)).unwrap();
        let context = nic.open();
        let resolved = context.resolved();
        assert_eq!((resolved.link, resolved.why.as_str()), (LinkKind::Kernel, "icrc-by-nic"));
        let port = resolved.port.unwrap();
        assert_eq!(port.chosen, info.gids[0], "the best of the list");
        println!("{}: {} ({})", info.name, context.local(), port.chosen.why);
        // Another entry by its number, and one that is not there.
        for other in &info.gids {
            let options = IbvOptions::new().device(&info.name).port(other.port);
            let nic = Nic::ibv(options.gid_index(other.gid_index)).unwrap();
            assert_eq!(nic.open().resolved().port.unwrap().chosen.gid_index, other.gid_index);
        }
        let options = IbvOptions::new().device(&info.name).gid_index(254);
        let error = Nic::ibv(options).unwrap_err();
        assert!(error.is_no_route(), "{error}");
        assert_eq!(error.reasons().len(), info.gids.len() + info.rejected.len(), "{error:#}");
    }
    let error = Nic::ibv(IbvOptions::new().device("none9")).unwrap_err();
    assert!(error.is_not_found() && error.to_string().contains(&nics[0].name), "{error}");
}

/// Memory of a simulated GPU is a dma-buf of the kernel's where it makes them; soft RoCE takes none.
#[test]
fn memory_of_a_gpu_is_registered_or_refused_with_a_reason_for_each_way() {
    let Some(nics) = nics() else { return };
    let mut config = beeline::config::SimConfig::default();
    (config.profile, config.memory_bytes) = (Profile::Bar, 4 << 20);
    let gpu = Gpu::simulated(&config).unwrap();
    let buffer = gpu.alloc(65_536).unwrap();
    for info in nics {
        let nic = Nic::ibv(IbvOptions::new().device(&info.name)).unwrap();
        let pd = nic.open().alloc_pd().unwrap();
        let dynamic = pd.reg_gpu_dynamic(&buffer, Access::ALL).unwrap_err();
        assert_eq!(dynamic.code(), "dynamic-unsupported");
        match pd.reg_gpu(&buffer, Access::ALL) {
            Ok(mr) => assert_eq!(mr.resolved().route.unwrap().as_str(), "dma-buf"),
            Err(error) => {
                let codes: Vec<_> =
                    error.reasons().iter().map(|reason| reason.code.as_str()).collect();
                println!("{}: {error:#}", info.name);
                let first = if info.soft_roce { "dmabuf-unsupported" } else { codes[1] };
                assert_eq!(codes, [first, "device-simulated"], "{error:#}");
            }
        }
    }
}

/// What `rdma_rxe` cannot show: a NIC that goes past the CPU, into memory of a GPU.
#[test]
fn a_nic_in_hardware_reaches_gpu_memory() {
    let hardware =
        Nic::list().unwrap().into_iter().find(|nic| !nic.soft_roce && !nic.gids.is_empty());
    let gpu = Gpu::default_device().ok().filter(|gpu| !gpu.info().simulated);
    let (Some(info), Some(gpu)) = (hardware, gpu) else {
        println!("SKIP RDMA hardware with a GPU");
        return;
    };
    let nic = Nic::ibv(IbvOptions::new().device(&info.name)).unwrap();
    let pd = nic.open().alloc_pd().unwrap();
    let buffer = gpu.alloc_shareable(2 << 20).unwrap();
    let mr = pd.reg_gpu(&buffer, Access::ALL).unwrap();
    println!("{}: {:?}", info.name, mr.resolved());
    assert!(mr.resolved().route.is_some());
    mr.flush().unwrap();
    mr.deregister().map_err(|(_, error)| error).unwrap();
}
