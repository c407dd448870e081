"""Fields and layer types that BVLC Caffe never had, and the fork they come from: for error messages alone."""

from __future__ import annotations

_SSD = "SSD Caffe"
_YOLO = "the YOLO forks"
_SEGNET = "SegNet's Caffe"
_DEEPLAB = "DeepLab's Caffe"
_NVIDIA = "NVIDIA's Caffe"
_RCNN = "Fast R-CNN's Caffe"
_FLOW = "FlowNet's Caffe"

FORK_FIELDS = {
    "annotated_data_param": _SSD,
    "detection_evaluate_param": _SSD,
    "detection_output_param": _SSD,
    "distort_param": _SSD,
    "emit_constraint": _SSD,
    "expand_param": _SSD,
    "multibox_loss_param": _SSD,
    "noise_param": _SSD,
    "norm_param": _SSD,
    "permute_param": _SSD,
    "prior_box_param": _SSD,
    "resize_param": _SSD,
    "video_data_param": _SSD,
    "detection_loss_param": _YOLO,
    "region_loss_param": _YOLO,
    "reorg_param": _YOLO,
    "yolov3_param": _YOLO,
    "dense_image_data_param": _SEGNET,
    "upsample_param": _SEGNET,
    "weight_by_label_freqs": _SEGNET,
    "class_weighting": _SEGNET,
    "bn_param": "SegNet's, DeepLab's and PSPNet's Caffe",
    "interp_param": "DeepLab's and PSPNet's Caffe",
    "mat_read_param": _DEEPLAB,
    "mat_write_param": _DEEPLAB,
    "seg_accuracy_param": _DEEPLAB,
    "seg_refine_param": _DEEPLAB,
    "unique_label_param": _DEEPLAB,
    "scale_bias": _NVIDIA,
    "scale_filler": _NVIDIA,
    "bias_filler": _NVIDIA,
    "detectnet_augmentation_param": _NVIDIA,
    "detectnet_groundtruth_param": _NVIDIA,
    "default_forward_type": _NVIDIA,
    "default_backward_type": _NVIDIA,
    "global_grad_scale": _NVIDIA,
    "rampup_interval": _NVIDIA,
    "larc": _NVIDIA,
    "larc_policy": _NVIDIA,
    "roi_pooling_param": _RCNN,
    "smooth_l1_loss_param": _RCNN,
    "psroi_pooling_param": "R-FCN's Caffe",
    "box_annotator_ohem_param": "R-FCN's Caffe",
    "roi_warping_param": "MNC's Caffe",
    "augmentation_param": _FLOW,
    "correlation_param": _FLOW,
    "custom_data_param": _FLOW,
    "flow_warp_param": _FLOW,
    "l1_loss_param": _FLOW,
    "shuffle_channel_param": "the ShuffleNet forks",
    "conv_depthwise_param": "the MobileNet forks",
    "center_loss_param": "the face recognition forks",
    "triplet_loss_param": "the face recognition forks",
    "margin_inner_product_param": "SphereFace's Caffe",
    "multi_stage_meanfield_param": "CRF-RNN's Caffe",
    "ceil_mode": "a fork (BVLC has round_mode: FLOOR)",
    "stepearly": "a fork",
    "engine_type": "a fork",
}
